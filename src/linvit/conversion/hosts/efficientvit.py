"""EfficientViT's `LiteMLA` (MIT): multi-scale q, k, v from convolutions, natively with ReLU linear attention.

Each head's channels are q, k and v in turn; the multi-scale branch doubles the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.efficientvit_mit import LiteMLA
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Grids, Host


class EfficientViTHost(Host, LiteMLA):
    original = LiteMLA
    native = "relu_linear"

    @staticmethod
    def shape(module: Any) -> Shape:
        heads = module.qkv.conv.out_channels // (3 * module.dim) * (1 + len(module.aggreg))
        return Shape(heads, module.dim, dim=module.qkv.conv.in_channels)

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"eps": module.eps} if mechanism == "relu_linear" else {}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[-2:])

    def forward(self, x: Tensor) -> Tensor:
        grid = TokenGrid(x.shape[2], x.shape[3])
        qkv = self.qkv(x)
        picture = torch.cat([qkv, *(branch(qkv) for branch in self.aggreg)], dim=1)
        heads = grid.from_map(picture, picture.shape[1] // (3 * self.dim))
        q, k, v = heads.chunk(3, dim=-1)
        out = self.attend(q, k, v, grid, x=x.flatten(2).transpose(1, 2))
        return self.proj(grid.to_map(out))
