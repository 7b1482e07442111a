"""MaxViT, CoAtNet and MaxxViT: `Attention2d` on pictures and `AttentionCl` with channels last, whole, in windows or on
a dilated grid.

Exact for softmax. The relative bias (a table, TensorFlow's table, or an MLP of log-spaced offsets) is exact in
mechanisms with logits and given up with `drop=("relative_bias",)` elsewhere. CoAtNet takes any input size: tables are
resized, the MLP is asked for the new offsets. MaxViT takes sizes that its window and grid divide, as the original.
"""

from __future__ import annotations

from typing import Any

from timm.models.maxxvit import Attention2d, AttentionCl
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, bias_ask, dropout_ask, width_ask
from linvit.conversion.pictures import after_projection
from linvit.conversion.relative import resized_bias


def module_bias(rel_pos: Any, grid: TokenGrid) -> Tensor:
    """The bias `(1, heads, tokens, tokens)` of one of timm's relative position modules, on any grid."""
    if (grid.height, grid.width) == tuple(rel_pos.window_size):
        bias = rel_pos.get_bias()
        return bias if bias.ndim == 4 else bias[None]
    return resized_bias(rel_pos, grid)


class _MaxxBase(Host):
    """What the two share: everything but the layout of pictures."""

    rel_pos: Any
    qkv: Any
    num_heads: Any
    dim_head: Any
    head_first: Any

    @staticmethod
    def shape(module: Any) -> Shape:
        window = None if module.rel_pos is None else TokenGrid(*module.rel_pos.window_size)
        return Shape(module.num_heads, module.dim_head, dim=module.qkv.weight.shape[1], grid=window)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        bias = [bias_ask("relative_bias")] if module.rel_pos is not None else []
        return bias + width_ask(module.proj) + dropout_ask(module)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.rel_pos = None

    def _attend(self, qkv: Tensor, x: Tensor, grid: TokenGrid, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        """From projected tokens `(batch, tokens, channels)` to the mixed ones, and the queries."""
        if self.head_first:
            q, k, v = qkv.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        else:
            q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = shared
        if self.rel_pos is not None:
            bias = module_bias(self.rel_pos, grid) if self.mechanism.capabilities.bias else None
        out = self.attend(q, k, v, grid, bias=bias, x=x)
        return out.transpose(1, 2).flatten(2), q


class MaxxPictureHost(_MaxxBase, Attention2d):
    original = Attention2d

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[-2:])

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid = TokenGrid(x.shape[2], x.shape[3])
        tokens = x.flatten(2).transpose(1, 2)
        out, q = self._attend(self.qkv(x).flatten(2).transpose(1, 2), tokens, grid, shared_rel_pos)
        return self.proj_drop(after_projection(self.mechanism, self.proj(grid.to_map(out[:, None])), q))


class MaxxHost(_MaxxBase, AttentionCl):
    original = AttentionCl

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[1:3])

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        tokens = x.flatten(1, 2)
        grid = TokenGrid(x.shape[1], x.shape[2])
        out, q = self._attend(self.qkv(tokens), tokens, grid, shared_rel_pos)
        out = self.mechanism.after_projection(self.proj(out), q)
        return self.proj_drop(out.unflatten(1, (grid.height, grid.width)))
