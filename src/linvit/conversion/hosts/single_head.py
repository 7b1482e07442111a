"""Single-head attention over pictures: SHViT's `SHSA` on a part of the channels, iFormer's gated `SHMA`, whole or in
windows. Values are wider than keys. Exact for softmax, any input size."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.iformer import SHMA
from timm.models.shvit import SHSA
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import WIDE_VALUES, PictureHost, grid_of, to_tokens


class SHViTHost(PictureHost, SHSA):
    original = SHSA
    needs = (WIDE_VALUES,)

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(1, module.qk_dim, module.pdim, dim=module.pdim)

    def forward(self, x: Tensor) -> Tensor:
        grid = grid_of(x)
        seen, rest = x.split([self.pdim, self.dim - self.pdim], dim=1)
        seen = self.pre_norm(seen)
        q, k, v = grid.from_map(self.qkv(seen), 1).split([self.qk_dim, self.qk_dim, self.pdim], dim=-1)
        out = grid.to_map(self.attend(q, k, v, grid, x=to_tokens(seen)))
        return self.proj(torch.cat((out, rest), dim=1))


class IFormerHost(PictureHost, SHMA):
    original = SHMA
    needs = (WIDE_VALUES,)

    @classmethod
    def shape(cls, module: Any) -> Shape:
        dim, keys, values = (getattr(module, name).c.weight.shape for name in ("q", "k", "proj"))
        grid = TokenGrid(module.window_size, module.window_size) if module.window_size else None
        return Shape(1, keys[0], values[1], dim=dim[1], grid=grid)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return None if module.window_size else grid_of(args[0])

    def _mix(self, x: Tensor) -> Tensor:
        grid = grid_of(x)
        v, gate = self.gate_act(self.v_gate(x)).chunk(2, dim=1)
        q, k, v = (grid.from_map(t, 1) for t in (self.q(x), self.k(x), v))
        out = grid.to_map(self.attend(q, k, v, grid, x=to_tokens(x)))
        return self.proj(out * gate)

    def forward(self, x: Tensor) -> Tensor:
        side = self.window_size
        if not side:
            return self._mix(x)
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, -width % side, 0, -height % side))
        out = self._mix(self._window_partition(padded, side))
        return self._window_reverse(out, side, *padded.shape[-2:])[:, :, :height, :width]
