"""EfficientFormer's attention in its last blocks, with values wider than keys and a bias for each offset.

Exact for softmax. The bias is exact in mechanisms with logits and given up with `drop=("relative_bias",)` elsewhere.
The original takes one input size; here the bias table, learned on 7×7, is resized for any other.
"""

from __future__ import annotations

from typing import Any

from timm.models.efficientformer import Attention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, bias_ask, offset_bias, wide_ask
from linvit.conversion.pictures import follow_pictures

LEARNED = (7, 7)  # every model has its table on the grid of a 224-pixel image


class EfficientFormerV1Host(Host, Attention):
    original = Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.val_dim, dim=module.qkv.in_features)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        bias = [bias_ask("relative_bias")] if module.attention_biases is not None else []
        return [*bias, wide_ask()]

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.attention_biases = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_pictures(model, cls)

    def _bias(self, grid: TokenGrid | None) -> Tensor | None:
        if self.attention_biases is None or not self.mechanism.capabilities.bias:
            return None
        return offset_bias(self.attention_biases, LEARNED, grid or TokenGrid(*LEARNED))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([self.key_dim, self.key_dim, self.val_dim], dim=-1)
        grid = self.grids.grid if self.grids is not None else None
        out = self.attend(q, k, v, grid, bias=self._bias(grid), x=x)
        return self.mechanism.after_projection(self.proj(out.transpose(1, 2).flatten(2)), q)
