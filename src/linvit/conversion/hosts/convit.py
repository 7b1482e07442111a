"""ConViT: gated positional self-attention in the early layers, plain self-attention behind them.

    out = (1 − g) · attend(q, k, v) + g · position(v),  g = σ(gate) per head

Exact for softmax, at the image size the model was built for. The positional half does not depend on the image and is
kept exactly whatever the mechanism: its logits are a sum of a function of the row offset and one of the column offset,
so its softmax is one along the rows times one along the columns, and costs N·(H + W) and not N². Only the content half
gets the mechanism.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from timm.models.convit import GPSA, MHSA
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import PlainHost, SequenceHost, unpack


class GPSAHost(SequenceHost, GPSA):
    original = GPSA

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.dim // module.num_heads, dim=module.dim)

    def _along(self, length: int, weight: Tensor, square: Tensor) -> Tensor:
        """The positional map along one axis, `(heads, length, length)`. The bias cancels, as in the original."""
        steps = torch.arange(length, device=weight.device, dtype=weight.dtype)
        offset = steps[None, :] - steps[:, None]
        logits = weight[:, None, None] * offset + square[:, None, None] * offset**2
        return (logits + self.pos_proj.bias[:, None, None]).softmax(-1)

    def _position(self, v: Tensor, grid: TokenGrid) -> Tensor:
        across, down, square = self.pos_proj.weight.unbind(1)
        rows, columns = self._along(grid.height, down, square), self._along(grid.width, across, square)
        picture = v.unflatten(2, (grid.height, grid.width))
        picture = torch.einsum("hxy,bhryd->bhrxd", columns, picture)
        return torch.einsum("hrs,bhsxd->bhrxd", rows, picture).flatten(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.token_grid
        assert grid is not None
        q, k = unpack(self.qk(x), 2, self.num_heads)
        v = self.split_heads(self.v(x))
        gate = self.gating_param.sigmoid()[:, None, None]
        out = (1 - gate) * self.attend(q, k, v, grid, x=x) + gate * self._position(v, grid)
        return self.proj_drop(self.project_out(out, q))


class MHSAHost(PlainHost, MHSA):
    """The class token joins behind the positional layers, so there is one prefix token here and none there."""

    original = MHSA

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return None if image.grid is None else replace(image.grid, prefix=1)

    @property
    def token_grid(self) -> TokenGrid | None:
        return None if self.grids is None else self.grid(self, (), self.grids)
