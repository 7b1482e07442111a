"""Swin v2's `WindowAttention` and the `WindowMultiHeadAttention` of timm's own `swinv2_cr` models.

Both compare directions: q and k have unit length and a learned temperature scales their product. Here q carries the
temperature, so softmax is exact and ReLU-quadratic keeps it. Elsewhere q and k are unit vectors too, but the
temperature only counts in mechanisms that see the length of q; a row sum divides it out. The bias, an MLP of
log-spaced offsets, and the shift mask are exact in mechanisms with logits; others give them up with
`drop=("relative_bias", "shift_mask")`, and the MLP goes.
"""

from __future__ import annotations

import math

import torch
from timm.models.swin_transformer_v2 import WindowAttention
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from torch import Tensor
from torch.nn import functional as F

from linvit.conversion.host import biased_projection, unpack
from linvit.conversion.hosts.swin import ShiftedWindowHost


class _CosineWindows(ShiftedWindowHost):
    """What the two share: unit vectors and a temperature."""

    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        temperature = self.logit_scale.clamp(max=math.log(100)).exp().reshape(-1, 1, 1)
        return F.normalize(q, dim=-1) * (temperature * q.shape[-1] ** 0.5), F.normalize(k, dim=-1)


class SwinV2Host(_CosineWindows, WindowAttention):
    original = WindowAttention
    features = {"relative_bias": ("cpb_mlp",), "shift_mask": ()}

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return unpack(biased_projection(self, x), 3, self.num_heads)

    def _position(self) -> Tensor | None:
        if self.cpb_mlp is None:
            return None
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        return 16 * torch.sigmoid(table[self.relative_position_index].permute(2, 0, 1))[None]


class SwinV2CrHost(_CosineWindows, WindowMultiHeadAttention):
    original = WindowMultiHeadAttention
    features = {"relative_bias": ("meta_mlp",), "shift_mask": ()}
    relative_coordinates_log: Tensor

    def _position(self) -> Tensor | None:
        return None if self.meta_mlp is None else self._relative_positional_encodings()

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """timm's own fills a buffer of the old size, and so fails for every other window."""
        if tuple(window_size) != tuple(self.window_size):
            pairs = (window_size[0] * window_size[1]) ** 2
            self.relative_coordinates_log = self.logit_scale.new_empty(pairs, 2)
            super().set_window_size(window_size)
