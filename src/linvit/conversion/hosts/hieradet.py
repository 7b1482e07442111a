"""SAM 2's `MultiScaleAttention` (HieraDet): over windows or the whole picture, with max-pooled queries where a stage
begins. Exact for softmax, any input size. Layers with pooled queries need a mechanism that takes fewer queries than
keys; a plan can keep them as they are.
"""

from __future__ import annotations

from typing import Any

from timm.models.hieradet_sam2 import MultiScaleAttention
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.conversion.host import POOLED_QUERIES, Ask, ChannelsLastHost, grid_of


class HieraDetHost(ChannelsLastHost, MultiScaleAttention):
    original = MultiScaleAttention

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([POOLED_QUERIES] if module.q_pool is not None else [])

    def forward(self, x: Tensor) -> Tensor:
        grid = key_grid = TokenGrid(x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        q, k, v = self.project(x)
        if self.q_pool is not None:
            picture = self.q_pool(grid.to_map(q))
            grid = grid_of(picture)
            q = grid.from_map(picture, self.num_heads)
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        return self.project_out(out, q).unflatten(1, (grid.height, grid.width))
