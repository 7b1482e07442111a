"""MaxViT, CoAtNet and MaxxViT: `Attention2d` on pictures and `AttentionCl` with channels last, whole, in windows or on
a dilated grid.

Exact for softmax. The relative bias (a table, TensorFlow's table, or an MLP of log-spaced offsets) is exact in
mechanisms with logits and given up with `drop=("relative_bias",)` elsewhere. CoAtNet takes any input size: tables are
resized, the MLP is asked for the new offsets. MaxViT takes sizes that its window and grid divide, as the original.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from timm.models.maxxvit import Attention2d, AttentionCl
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import (
    ChannelsLastHost,
    Host,
    PictureHost,
    after_projection,
    grid_of,
    has_logits,
    merge_heads,
    to_tokens,
    unpack,
)
from linvit.conversion.relative import on_grid, resized_bias


def module_bias(rel_pos: Any, grid: TokenGrid) -> Tensor:
    """The bias `(1, heads, tokens, tokens)` of one of timm's relative position modules, on any grid."""
    if not on_grid(rel_pos, grid):
        return resized_bias(rel_pos, grid)
    bias = rel_pos.get_bias()
    return bias if bias.ndim == 4 else bias[None]


class _MaxxBase(Host):
    """What the two share: everything but the layout of pictures."""

    features = {"relative_bias": ("rel_pos",)}

    @classmethod
    def shape(cls, module: Any) -> Shape:
        window = None if module.rel_pos is None else TokenGrid(*module.rel_pos.window_size)
        return replace(super().shape(module), grid=window)

    def _attend(self, qkv: Tensor, x: Tensor, grid: TokenGrid, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        """From projected tokens `(batch, tokens, channels)` to the mixed heads, and the queries."""
        if self.head_first:
            q, k, v = self.split_heads(qkv).chunk(3, dim=-1)
        else:
            q, k, v = unpack(qkv, 3, self.num_heads)
        bias = shared
        if self.rel_pos is not None:
            bias = module_bias(self.rel_pos, grid) if has_logits(self.mechanism) else None
        return self.attend(q, k, v, grid, bias=bias, x=x), q


class MaxxPictureHost(_MaxxBase, PictureHost, Attention2d):
    original = Attention2d

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid = grid_of(x)
        out, q = self._attend(to_tokens(self.qkv(x)), to_tokens(x), grid, shared_rel_pos)
        picture = self.proj(grid.to_map(merge_heads(out)[:, None]))
        return self.proj_drop(after_projection(self.mechanism, picture, q))


class MaxxHost(_MaxxBase, ChannelsLastHost, AttentionCl):
    original = AttentionCl

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid, tokens = TokenGrid(x.shape[1], x.shape[2]), x.flatten(1, 2)
        out, q = self._attend(self.qkv(tokens), tokens, grid, shared_rel_pos)
        return self.proj_drop(self.project_out(out, q).unflatten(1, (grid.height, grid.width)))
