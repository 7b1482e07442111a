"""SAM 2's `MultiScaleAttention` (HieraDet): over windows or the whole picture, with max-pooled queries where a stage
begins. Exact for softmax, any input size. Layers with pooled queries need a mechanism that takes fewer queries than
keys; a plan can keep them as they are.
"""

from __future__ import annotations

from typing import Any

from timm.models.hieradet_sam2 import MultiScaleAttention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, unequal_ask


class HieraDetHost(Host, MultiScaleAttention):
    original = MultiScaleAttention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.dim_out // module.num_heads, dim=module.dim)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [unequal_ask("pooled queries", droppable=False)] if module.q_pool is not None else []

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[1:3])

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        grid = key_grid = TokenGrid(height, width)
        x = x.flatten(1, 2)
        q, k, v = self.qkv(x).reshape(batch, grid.tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.q_pool is not None:
            picture = self.q_pool(grid.to_map(q))
            grid = TokenGrid(picture.shape[2], picture.shape[3])
            q = grid.from_map(picture, self.num_heads)
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.mechanism.after_projection(out, q).unflatten(1, (grid.height, grid.width))
