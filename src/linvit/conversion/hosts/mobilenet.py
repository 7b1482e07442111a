"""MobileNetV4 hybrid and MobileNetV5: `Attention2d` and `MultiQueryAttention2d` of timm's layers, over pictures.

Exact for softmax, any input size. In multi-query attention all heads share one key and one value head; the mechanism
sees them repeated. `drop=("pooling",)` takes strided keys and pooled queries out, for mechanisms that need as many keys
as queries.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from timm.layers import Attention2d, MultiQueryAttention2d
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import (
    ANOTHER_WIDTH,
    FEATURES,
    WIDE_VALUES,
    Ask,
    Host,
    PictureHost,
    after_projection,
    changes_width,
    grid_of,
    to_tokens,
)

POOLING = ("down_pool", "down_conv", "norm", "upsample")


class Attention2dHost(PictureHost, Attention2d):
    original = Attention2d

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        grid, qkv = grid_of(x), self.qkv(x)
        if self.head_first:
            q, k, v = grid.from_map(qkv, self.num_heads).chunk(3, dim=-1)
        else:
            q, k, v = (grid.from_map(t, self.num_heads) for t in qkv.chunk(3, dim=1))
        out = self.attend(q, k, v, grid, bias=attn_mask, x=to_tokens(x))
        return self.proj_drop(after_projection(self.mechanism, self.proj(grid.to_map(out)), q))


class MultiQueryHost(Host, MultiQueryAttention2d):
    original = MultiQueryAttention2d

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.value_dim, dim=module.query.proj.in_channels)

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        pooled = [FEATURES["pooling"]] if module.has_query_strides or module.kv_stride > 1 else []
        wide = [WIDE_VALUES] if module.value_dim != module.key_dim else []
        width = [ANOTHER_WIDTH] if changes_width(module.output.proj) else []
        return pooled + super().asks(model, module) + wide + width

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        if feature == "pooling":
            for name in ("query", "key", "value", "output"):
                setattr(module, name, without_pooling(getattr(module, name)))
            module.has_query_strides, module.query_strides, module.kv_stride = False, (1, 1), 1

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[0].shape[-2:]
        return TokenGrid(-(-height // module.kv_stride), -(-width // module.kv_stride))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        grid, keys = grid_of(query), grid_of(key)
        q = grid.from_map(query, self.num_heads)
        k, v = (keys.from_map(t, 1).expand(-1, self.num_heads, -1, -1) for t in (key, value))
        tokens = None if self.has_query_strides else to_tokens(x)
        out = self.output(grid.to_map(self.attend(q, k, v, grid, key_grid=keys, bias=attn_mask, x=tokens)))
        return out if self.has_query_strides else after_projection(self.mechanism, out, q)


def without_pooling(part: nn.Module) -> nn.Sequential:
    """A sequence of the same modules, under the same names, but for those that pool."""
    rest = nn.Sequential(OrderedDict((name, m) for name, m in part.named_children() if name not in POOLING))
    rest.training = part.training
    return rest
