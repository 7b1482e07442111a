"""FastViT's attention over pictures, in its last stage. Exact for softmax, any input size. The stages that mix tokens
by convolution stay as they are."""

from __future__ import annotations

from typing import Any

from timm.models.fastvit import Attention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Grids, Host


class FastViTHost(Host, Attention):
    original = Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.qkv.in_features)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[-2:])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, TokenGrid(x.shape[2], x.shape[3]), x=tokens)
        out = self.mechanism.after_projection(self.proj(out.transpose(1, 2).flatten(2)), q)
        return self.proj_drop(out).transpose(1, 2).reshape(x.shape)
