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
from linvit.conversion.host import Ask, Grids, Host, bias_ask, offset_bias, unequal_ask


class _EfficientFormerBase(Host):
    attention_biases: Any
    resolution: Any
    num_heads: Any

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.d)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.attention_biases = None
            module.attention_bias_idxs = None
        if feature == "talking_heads":
            module.talking_head1 = module.talking_head2 = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[0].shape[-2:]
        if getattr(module, "stride_conv", None) is not None:
            height, width = -(-height // 2), -(-width // 2)
        return TokenGrid(height, width)

    def _init_buffers(self) -> None:
        if self.attention_biases is not None:
            super()._init_buffers()  # type: ignore[misc]

    def _bias(self, keys: TokenGrid, stride: int) -> Tensor | None:
        if not self.mechanism.capabilities.bias or self.attention_biases is None:
            return None
        return offset_bias(self.attention_biases, self.resolution, keys, stride)

    def _heads(self, picture: Tensor) -> Tensor:
        return TokenGrid(picture.shape[2], picture.shape[3]).from_map(picture, self.num_heads)

    def _join(self, out: Tensor, local: Tensor) -> Tensor:
        return TokenGrid(local.shape[2], local.shape[3]).to_map(out) + local


class EfficientFormerHost(_EfficientFormerBase, Attention2d):
    original = Attention2d

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        talking = [Ask("talking_heads", lambda m: m.name == "softmax")] if module.talking_head1 is not None else []
        return [bias_ask("relative_bias"), *talking]

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        if self.stride_conv is not None:
            x = self.stride_conv(x)
        v = self.v(x)
        grid = TokenGrid(x.shape[2], x.shape[3])
        q, k, heads = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(v)
        bias = self._bias(grid, 1)
        if self.talking_head1 is None:
            out = self.attend(q, k, heads, grid, bias=bias)
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

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [bias_ask("relative_bias"), unequal_ask("subsampled queries", droppable=False)]

    def forward(self, x: Tensor) -> Tensor:
        key_grid = TokenGrid(x.shape[2], x.shape[3])
        q, v = self.q(x), self.v(x)
        grid = TokenGrid(q.shape[2], q.shape[3])
        out = self.attend(
            self._heads(q),
            self._heads(self.k(x)),
            self._heads(v),
            grid,
            key_grid=key_grid,
            bias=self._bias(key_grid, 2),
        )
        return self.proj(self.act(self._join(out, self.v_local(v))))
