"""Windows: a mechanism inside each. Those that hang over the edge see zero padding as tokens, as in the originals."""

import math
from dataclasses import replace
from typing import Any

import torch
from timm.models import davit, swin_transformer, swin_transformer_v2
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from timm.models.twins import LocallyGroupedAttn
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Host, has_logits, merge_heads


class WindowHost(Host):
    """A host that sees the tokens of one window."""

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return replace(super().shape(module), grid=TokenGrid(*module.window_size))

    @property
    def window(self) -> TokenGrid:
        return TokenGrid(*self.window_size)


class DaViTHost(WindowHost, davit.WindowAttention):
    """DaViT's attention in windows. Exact for softmax, at any input size.

    Windows that hang over the edge see zero padding as tokens, as in the original. The channel attention between them
    is linear in the tokens already and stays as it is.
    """

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, self.window, x=x), q)


class TwinsLocalHost(Host, LocallyGroupedAttn):
    """Twins' `LocallyGroupedAttn`, inside windows. Exact for softmax, at any input size. Windows that hang over the
    edge see zero padding as tokens, as in the original."""

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return replace(super().shape(module), grid=TokenGrid(module.ws, module.ws))

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        batch, tokens, channels = x.shape
        (height, width), side = size, self.ws
        picture = F.pad(x.reshape(batch, height, width, channels), (0, 0, 0, -width % side, 0, -height % side))
        rows, columns = picture.shape[1] // side, picture.shape[2] // side
        windows = picture.reshape(batch, rows, side, columns, side, channels).transpose(2, 3)
        windows = windows.reshape(-1, side * side, channels)
        q, k, v = self.project(windows)
        out = self.proj(merge_heads(self.attend(q, k, v, TokenGrid(side, side), x=windows)))
        out = self.mechanism.after_projection(out, q)
        out = out.reshape(batch, rows, columns, side, side, channels).transpose(2, 3)
        out = out.reshape(batch, rows * side, columns * side, channels)[:, :height, :width]
        return self.proj_drop(out.reshape(batch, tokens, channels))


class GCViTHost(WindowHost, WindowAttentionGlobal):
    """GCViT's attention in windows, with queries of its own or with global ones that all windows share.

    Exact for softmax. The relative bias is exact in mechanisms with logits and given up with `drop=("relative_bias",)`
    elsewhere. Takes any size that its windows divide: the original needs the one it was built for, here global queries
    of another size are resized to the window.
    """

    features = {"relative_bias": ("rel_pos",)}

    def _queries(self, q_global: Tensor, windows: int) -> Tensor:
        """The global queries `(batch, height, width, channels)` for every window, in the original's order."""
        if q_global.shape[1:3] != tuple(self.window_size):
            picture = F.interpolate(q_global.permute(0, 3, 1, 2), self.window_size, mode="bilinear")
            q_global = picture.permute(0, 2, 3, 1)
        return self.split_heads(q_global.flatten(1, 2).repeat(windows // len(q_global), 1, 1))

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        k, v = heads[-2], heads[-1]
        q = self._queries(q_global, x.shape[0]) if self.use_global and q_global is not None else heads[0]
        bias = self.rel_pos.get_bias() if self.rel_pos is not None and has_logits(self.mechanism) else None
        return self.project_out(self.attend(q, k, v, self.window, bias=bias, x=x), q)


class ShiftedWindowHost(WindowHost):
    """Windows with relative positions; in every second layer they are shifted, and a mask parts what is wrapped."""

    features = {"shift_mask": ()}

    def _position(self) -> Tensor | None:
        raise NotImplementedError

    def _bias(self, mask: Tensor | None) -> Tensor | None:
        if not has_logits(self.mechanism):
            return None
        bias = self._position()
        if mask is None or "shift_mask" in self.given_up:
            return bias
        return mask[:, None] if bias is None else bias + mask[:, None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, self.window, bias=self._bias(mask), x=x), q)


class SwinHost(ShiftedWindowHost, swin_transformer.WindowAttention):
    """Swin's `WindowAttention`: a mechanism inside each window.

    Relative bias and shift mask are exact in mechanisms with logits (softmax, ReLU-quadratic: the mask goes in before
    the ReLU). A linear one cannot honour them; `drop=("relative_bias", "shift_mask")` gives them up, as FLatten's code
    does.
    """

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


class _CosineWindows(ShiftedWindowHost):
    """What the two of Swin v2 share: unit vectors and a temperature."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().project(x)
        temperature = self.logit_scale.clamp(max=math.log(100)).exp().reshape(-1, 1, 1)
        return F.normalize(q, dim=-1) * (temperature * q.shape[-1] ** 0.5), F.normalize(k, dim=-1), v


class SwinV2Host(_CosineWindows, swin_transformer_v2.WindowAttention):
    """Swin v2's `WindowAttention` and the `WindowMultiHeadAttention` of timm's own `swinv2_cr` models.

    Both compare directions: q and k have unit length and a learned temperature scales their product. Here q carries the
    temperature, so softmax is exact and ReLU-quadratic keeps it. Elsewhere q and k are unit vectors too, but the
    temperature only counts in mechanisms that see the length of q; a row sum divides it out. The bias, an MLP of
    log-spaced offsets, and the shift mask are exact in mechanisms with logits; others give them up with
    `drop=("relative_bias", "shift_mask")`, and the MLP goes.
    """

    features = {"relative_bias": ("cpb_mlp",), "shift_mask": ()}

    def _position(self) -> Tensor | None:
        if self.cpb_mlp is None:
            return None
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        return 16 * torch.sigmoid(table[self.relative_position_index].permute(2, 0, 1))[None]


class SwinV2CrHost(_CosineWindows, WindowMultiHeadAttention):
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
