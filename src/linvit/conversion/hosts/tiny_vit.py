"""TinyViT's attention in windows, with a bias for each offset.

Exact for softmax, at any input size. The bias is exact in mechanisms with logits and given up with
`drop=("relative_bias",)` elsewhere. Windows that hang over the edge see zero padding as tokens, as in the original.
"""

from __future__ import annotations

from typing import Any

from timm.models.tiny_vit import Attention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Host, bias_ask, offset_bias


class TinyViTHost(Host, Attention):
    original = Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        grid = TokenGrid(*module.resolution)
        return Shape(module.num_heads, module.key_dim, module.val_dim, dim=module.qkv.in_features, grid=grid)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [bias_ask("relative_bias")] if module.attention_biases is not None else []

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.attention_biases = module.attention_bias_idxs = None

    def _init_buffers(self) -> None:
        if self.attention_biases is not None:
            super()._init_buffers()

    def forward(self, x: Tensor) -> Tensor:
        grid = TokenGrid(*self.resolution)
        x = self.norm(x)
        heads = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([self.key_dim, self.key_dim, self.val_dim], dim=-1)
        bias = None
        if self.attention_biases is not None and self.mechanism.capabilities.bias:
            bias = offset_bias(self.attention_biases, self.resolution, grid)
        out = self.attend(q, k, v, grid, bias=bias, x=x)
        return self.mechanism.after_projection(self.proj(out.transpose(1, 2).flatten(2)), q)
