"""Visformer's attention over pictures. Exact for softmax. The model around it fixes the input size, as in the
original."""

from __future__ import annotations

from typing import Any

from timm.models.visformer import Attention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, width_ask
from linvit.conversion.pictures import after_projection


class VisformerHost(Host, Attention):
    original = Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.dim)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return width_ask(module.proj) + dropout_ask(module)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[-2:])

    def forward(self, x: Tensor) -> Tensor:
        grid = TokenGrid(x.shape[2], x.shape[3])
        q, k, v = (grid.from_map(t, self.num_heads) for t in self.qkv(x).chunk(3, dim=1))
        out = self.proj(grid.to_map(self.attend(q, k, v, grid, x=x.flatten(2).transpose(1, 2))))
        return self.proj_drop(after_projection(self.mechanism, out, q))
