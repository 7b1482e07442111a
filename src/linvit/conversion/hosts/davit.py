"""DaViT's attention in windows. Exact for softmax, at any input size.

Windows that hang over the edge see zero padding as tokens, as in the original. The channel attention between them is
linear in the tokens already and stays as it is.
"""

from __future__ import annotations

from typing import Any

from timm.models.davit import WindowAttention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Host


class DaViTHost(Host, WindowAttention):
    original = WindowAttention

    @staticmethod
    def shape(module: Any) -> Shape:
        grid = TokenGrid(*module.window_size)
        return Shape(module.num_heads, module.dim // module.num_heads, dim=module.dim, grid=grid)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, TokenGrid(*self.window_size), x=x)
        return self.mechanism.after_projection(self.proj(out.transpose(1, 2).flatten(2)), q)
