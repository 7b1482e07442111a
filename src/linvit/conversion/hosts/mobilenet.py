"""MobileNetV4 hybrid and MobileNetV5: `Attention2d` and `MultiQueryAttention2d` of timm's layers, over pictures.

Exact for softmax, any input size. In multi-query attention all heads share one key and one value head; the mechanism
sees them repeated. `drop=("pooling",)` takes strided keys and pooled queries out, for mechanisms that need as many keys
as queries.
"""

from __future__ import annotations

from typing import Any

from timm.layers import Attention2d, MultiQueryAttention2d
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, unequal_ask, wide_ask, width_ask
from linvit.conversion.pictures import after_projection


class PictureHost(Host, Attention2d):
    original = Attention2d

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.dim_head, dim=module.qkv.in_channels)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return width_ask(module.proj) + dropout_ask(module)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[-2:])

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        grid, qkv = TokenGrid(x.shape[2], x.shape[3]), self.qkv(x)
        if self.head_first:
            q, k, v = grid.from_map(qkv, self.num_heads).chunk(3, dim=-1)
        else:
            q, k, v = (grid.from_map(t, self.num_heads) for t in qkv.chunk(3, dim=1))
        out = self.attend(q, k, v, grid, bias=attn_mask, x=x.flatten(2).transpose(1, 2))
        return self.proj_drop(after_projection(self.mechanism, self.proj(grid.to_map(out)), q))


class MultiQueryHost(Host, MultiQueryAttention2d):
    original = MultiQueryAttention2d

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.value_dim, dim=module.query.proj.in_channels)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        pooled = module.has_query_strides or module.kv_stride > 1
        unequal = [unequal_ask("pooling", droppable=True)] if pooled else []
        wide = [wide_ask()] if module.value_dim != module.key_dim else []
        return unequal + wide + width_ask(module.output.proj) + dropout_ask(module)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "pooling":
            for part in (module.query, module.key, module.value, module.output):
                for name in ("down_pool", "down_conv", "norm", "upsample"):
                    if hasattr(part, name):
                        delattr(part, name)
            module.has_query_strides, module.query_strides, module.kv_stride = False, (1, 1), 1

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[0].shape[-2:]
        return TokenGrid(-(-height // module.kv_stride), -(-width // module.kv_stride))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        grid, keys = TokenGrid(query.shape[2], query.shape[3]), TokenGrid(key.shape[2], key.shape[3])
        q = grid.from_map(query, self.num_heads)
        k, v = (keys.from_map(t, 1).expand(-1, self.num_heads, -1, -1) for t in (key, value))
        tokens = None if self.has_query_strides else x.flatten(2).transpose(1, 2)
        out = self.output(grid.to_map(self.attend(q, k, v, grid, key_grid=keys, bias=attn_mask, x=tokens)))
        return out if self.has_query_strides else after_projection(self.mechanism, out, q)
