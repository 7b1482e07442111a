"""Swin's `WindowAttention`: a mechanism inside each window.

Relative bias and shift mask are exact in mechanisms with logits (softmax, ReLU-quadratic: the mask goes in before the
ReLU). A linear one cannot honour them; `drop=("relative_bias", "shift_mask")` gives them up, as FLatten's code does.
"""

from __future__ import annotations

from timm.models.swin_transformer import WindowAttention
from torch import Tensor

from linvit.conversion.host import WindowHost, has_logits


class ShiftedWindowHost(WindowHost):
    """Windows with relative positions; in every second layer they are shifted, and a mask parts what is wrapped."""

    features = {"shift_mask": ()}

    def _position(self) -> Tensor | None:
        raise NotImplementedError

    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def _bias(self, mask: Tensor | None) -> Tensor | None:
        if not has_logits(self.mechanism):
            return None
        bias = self._position()
        if mask is None or "shift_mask" in self.given_up:
            return bias
        return mask[:, None] if bias is None else bias + mask[:, None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        q, k = self._scaled(q, k)
        out = self.attend(q, k, v, self.window, bias=self._bias(mask), x=x)
        return self.proj_drop(self.project_out(out, q))


class SwinHost(ShiftedWindowHost, WindowAttention):
    original = WindowAttention
    features = {"relative_bias": ("relative_position_bias_table",), "shift_mask": ()}

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        if self.relative_position_bias_table is not None:
            super().set_window_size(window_size)
            return
        self.window_size = window_size
        self.window_area = window_size[0] * window_size[1]

    def _init_buffers(self) -> None:
        if self.relative_position_bias_table is not None:
            super()._init_buffers()

    def _position(self) -> Tensor | None:
        return None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
