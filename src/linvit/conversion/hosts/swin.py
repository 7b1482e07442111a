"""Swin's `WindowAttention`: a mechanism inside each window.

Relative bias and shift mask are exact in mechanisms with logits (softmax, ReLU-quadratic: the mask goes in before the
ReLU). A linear one cannot honour them; `drop=("relative_bias", "shift_mask")` gives them up, as FLatten's code does.
"""

from __future__ import annotations

from typing import Any

from timm.models.swin_transformer import WindowAttention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Host, bias_ask, dropout_ask


class SwinHost(Host, WindowAttention):
    original = WindowAttention

    @staticmethod
    def shape(module: Any) -> Shape:
        width = module.qkv.out_features // 3 // module.num_heads
        return Shape(module.num_heads, width, dim=module.dim, grid=TokenGrid(*module.window_size))

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        table = [bias_ask("relative_bias")] if module.relative_position_bias_table is not None else []
        return [*table, bias_ask("shift_mask"), *dropout_ask(module)]

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.relative_position_bias_table = None

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        if self.relative_position_bias_table is not None:
            super().set_window_size(window_size)
            return
        self.window_size = window_size
        self.window_area = window_size[0] * window_size[1]

    def _init_buffers(self) -> None:
        if self.relative_position_bias_table is not None:
            super()._init_buffers()

    def _bias(self, mask: Tensor | None) -> Tensor | None:
        if not self.mechanism.capabilities.bias:
            return None
        bias = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
        if mask is None:
            return bias
        return mask[:, None] if bias is None else bias + mask[:, None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(windows, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, TokenGrid(*self.window_size), bias=self._bias(mask), x=x)
        out = self.proj(out.transpose(1, 2).reshape(windows, tokens, -1))
        return self.proj_drop(self.mechanism.after_projection(out, q))
