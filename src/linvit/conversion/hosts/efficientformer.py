"""EfficientFormer's attention in its last blocks, with values wider than keys and a bias for each offset.

Exact for softmax. The bias is exact in mechanisms with logits and given up with `drop=("relative_bias",)` elsewhere.
The original takes one input size; here the bias table, learned on 7×7, is resized for any other.
"""

from __future__ import annotations

from typing import Any

from timm.models.efficientformer import Attention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import WIDE_VALUES, OffsetBiasHost, SequenceHost


class EfficientFormerV1Host(OffsetBiasHost, SequenceHost, Attention):
    original = Attention
    features = {"relative_bias": ("attention_biases",)}  # its index stays, as it is among the weights
    needs = (WIDE_VALUES,)
    resolution = (7, 7)  # every model has its table on the grid of a 224-pixel image

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.val_dim, dim=module.qkv.in_features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split_packed(self.qkv(x))
        grid = self.token_grid
        bias = self.bias(grid or TokenGrid(*self.resolution))
        return self.project_out(self.attend(q, k, v, grid, bias=bias, x=x), q)
