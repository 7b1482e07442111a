"""TinyViT's attention in windows, with a bias for each offset.

Exact for softmax, at any input size. The bias is exact in mechanisms with logits and given up with
`drop=("relative_bias",)` elsewhere. Windows that hang over the edge see zero padding as tokens, as in the original.
"""

from __future__ import annotations

from typing import Any

from timm.models.tiny_vit import Attention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import OffsetBiasHost


class TinyViTHost(OffsetBiasHost, Attention):
    original = Attention

    @classmethod
    def shape(cls, module: Any) -> Shape:
        grid = TokenGrid(*module.resolution)
        return Shape(module.num_heads, module.key_dim, module.val_dim, dim=module.qkv.in_features, grid=grid)

    def forward(self, x: Tensor) -> Tensor:
        grid, x = TokenGrid(*self.resolution), self.norm(x)
        q, k, v = self.split_packed(self.qkv(x))
        return self.project_out(self.attend(q, k, v, grid, bias=self.bias(grid), x=x), q)
