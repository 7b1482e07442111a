"""EfficientFormerV2's attention over pictures and its down-sampling twin.

Talking heads mix the logits of all heads, which only softmax has: other mechanisms give them up with
`drop=("talking_heads", "relative_bias")`. The local branch on v and every projection stay. Any input size: the bias
table is resized.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.efficientformer_v2 import Attention2d, Attention2dDownsample
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import SUBSAMPLED_QUERIES, OffsetBiasHost, PictureHost, grid_of


class _EfficientFormerBase(OffsetBiasHost, PictureHost):
    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.d)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[0].shape[-2:]
        if getattr(module, "stride_conv", None) is not None:
            height, width = -(-height // 2), -(-width // 2)
        return TokenGrid(height, width)

    def _heads(self, picture: Tensor) -> Tensor:
        return grid_of(picture).from_map(picture, self.num_heads)

    def _join(self, out: Tensor, local: Tensor) -> Tensor:
        return grid_of(local).to_map(out) + local


class EfficientFormerHost(_EfficientFormerBase, Attention2d):
    original = Attention2d
    features = {**OffsetBiasHost.features, "talking_heads": ("talking_head1", "talking_head2")}

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        if self.stride_conv is not None:
            x = self.stride_conv(x)
        v = self.v(x)
        q, k, heads = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(v)
        bias = self.bias(grid_of(x))
        if self.talking_head1 is None:
            out = self.attend(q, k, heads, grid_of(x), bias=bias)
        else:
            logits = q @ k.transpose(-2, -1) * self.scale
            logits = logits if bias is None else logits + bias.to(logits.dtype)
            out = self.talking_head2(torch.softmax(self.talking_head1(logits), -1)) @ heads
        out = self._join(out, self.v_local(v))
        if self.upsample is not None:
            out = F.interpolate(out, size, mode="bilinear")
        return self.proj(self.act(out))


class EfficientFormerDownsampleHost(_EfficientFormerBase, Attention2dDownsample):
    original = Attention2dDownsample
    needs = (SUBSAMPLED_QUERIES,)

    def forward(self, x: Tensor) -> Tensor:
        keys, picture, v = grid_of(x), self.q(x), self.v(x)
        q, k, heads = self._heads(picture), self._heads(self.k(x)), self._heads(v)
        out = self.attend(q, k, heads, grid_of(picture), key_grid=keys, bias=self.bias(keys, 2))
        return self.proj(self.act(self._join(out, self.v_local(v))))
