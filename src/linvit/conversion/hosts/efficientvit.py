"""EfficientViT's `LiteMLA` (MIT): multi-scale q, k, v from convolutions, natively with ReLU linear attention.

Each head's channels are q, k and v in turn; the multi-scale branch doubles the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.efficientvit_mit import LiteMLA
from torch import Tensor

from linvit.attention import Shape
from linvit.conversion.host import PictureHost, grid_of, to_tokens


class EfficientViTHost(PictureHost, LiteMLA):
    original = LiteMLA
    native = "relu_linear"

    @classmethod
    def shape(cls, module: Any) -> Shape:
        heads = module.qkv.conv.out_channels // (3 * module.dim) * (1 + len(module.aggreg))
        return Shape(heads, module.dim, dim=module.qkv.conv.in_channels)

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"eps": module.eps} if mechanism == "relu_linear" else {}

    def forward(self, x: Tensor) -> Tensor:
        grid, qkv = grid_of(x), self.qkv(x)
        picture = torch.cat([qkv, *(branch(qkv) for branch in self.aggreg)], dim=1)
        q, k, v = grid.from_map(picture, picture.shape[1] // (3 * self.dim)).chunk(3, dim=-1)
        return self.proj(grid.to_map(self.attend(q, k, v, grid, x=to_tokens(x))))
