"""Visformer's attention over pictures. Exact for softmax. The model around it fixes the input size, as in the
original."""

from __future__ import annotations

from timm.models.visformer import Attention
from torch import Tensor

from linvit.conversion.host import PictureHost, after_projection, grid_of, to_tokens


class VisformerHost(PictureHost, Attention):
    original = Attention

    def forward(self, x: Tensor) -> Tensor:
        grid = grid_of(x)
        q, k, v = (grid.from_map(t, self.num_heads) for t in self.qkv(x).chunk(3, dim=1))
        out = self.proj(grid.to_map(self.attend(q, k, v, grid, x=to_tokens(x))))
        return self.proj_drop(after_projection(self.mechanism, out, q))
