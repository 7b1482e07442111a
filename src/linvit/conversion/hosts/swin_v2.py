"""Swin v2's `WindowAttention` and the `WindowMultiHeadAttention` of timm's own `swinv2_cr` models.

Both compare directions: q and k have unit length and a learned temperature scales their product. Here q carries the
temperature, so softmax is exact and ReLU-quadratic keeps it. Elsewhere q and k are unit vectors too, but the
temperature only counts in mechanisms that see the length of q; a row sum divides it out. The bias, an MLP of
log-spaced offsets, and the shift mask are exact in mechanisms with logits; others give them up with
`drop=("relative_bias", "shift_mask")`, and the MLP goes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.models.swin_transformer_v2 import WindowAttention
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Host, bias_ask, dropout_ask


def asks(module: Any, position: nn.Module | None) -> list[Ask]:
    bias = [bias_ask("relative_bias")] if position is not None else []
    return [*bias, bias_ask("shift_mask"), *dropout_ask(module)]


class _CosineWindows(Host):
    """What the two share: everything but the projection with its bias and the relative position."""

    num_heads: Any
    window_size: Any
    logit_scale: Any
    proj: Any
    proj_drop: Any

    @staticmethod
    def shape(module: Any) -> Shape:
        width = module.qkv.out_features // 3 // module.num_heads
        return Shape(module.num_heads, width, dim=module.qkv.in_features, grid=TokenGrid(*module.window_size))

    def _qkv(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _position(self) -> Tensor | None:
        raise NotImplementedError

    def _bias(self, mask: Tensor | None) -> Tensor | None:
        if not self.mechanism.capabilities.bias:
            return None
        bias = self._position()
        if mask is None:
            return bias
        return mask[:, None] if bias is None else bias + mask[:, None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, tokens, _ = x.shape
        q, k, v = self._qkv(x).reshape(windows, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        temperature = self.logit_scale.clamp(max=math.log(100)).exp().reshape(-1, 1, 1)
        q = F.normalize(q, dim=-1) * (temperature * q.shape[-1] ** 0.5)
        k = F.normalize(k, dim=-1)
        out = self.attend(q, k, v, TokenGrid(*self.window_size), bias=self._bias(mask), x=x)
        out = self.proj(out.transpose(1, 2).reshape(windows, tokens, -1))
        return self.proj_drop(self.mechanism.after_projection(out, q))


class SwinV2Host(_CosineWindows, WindowAttention):
    original = WindowAttention
    k_bias: Any

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return asks(module, module.cpb_mlp)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.cpb_mlp = None

    def _qkv(self, x: Tensor) -> Tensor:
        bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return F.linear(x, self.qkv.weight, bias)

    def _position(self) -> Tensor | None:
        if self.cpb_mlp is None:
            return None
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        return 16 * torch.sigmoid(table[self.relative_position_index].permute(2, 0, 1))[None]


class SwinV2CrHost(_CosineWindows, WindowMultiHeadAttention):
    original = WindowMultiHeadAttention
    relative_coordinates_log: Tensor

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return asks(module, module.meta_mlp)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.meta_mlp = None

    def _qkv(self, x: Tensor) -> Tensor:
        return self.qkv(x)

    def _position(self) -> Tensor | None:
        return None if self.meta_mlp is None else self._relative_positional_encodings()

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """timm's own fills a buffer of the old size, and so fails for every other window."""
        if tuple(window_size) != tuple(self.window_size):
            pairs = (window_size[0] * window_size[1]) ** 2
            self.relative_coordinates_log = self.logit_scale.new_empty(pairs, 2)
            super().set_window_size(window_size)
