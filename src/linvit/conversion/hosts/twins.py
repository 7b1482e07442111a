"""Twins: `LocallyGroupedAttn` inside windows and `GlobalSubSampleAttn` with keys from a strided convolution.

Exact for softmax, at any input size. Windows that hang over the edge see zero padding as tokens, as in the original.
`drop=("pooling",)` takes the strided convolution out, and the mechanism then sees every token as key.
"""

from __future__ import annotations

from typing import Any

from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Host
from linvit.conversion.hosts.pvt_v2 import PooledKeysHost


class TwinsLocalHost(Host, LocallyGroupedAttn):
    original = LocallyGroupedAttn

    @classmethod
    def shape(cls, module: Any) -> Shape:
        grid = TokenGrid(module.ws, module.ws)
        return Shape(module.num_heads, module.dim // module.num_heads, dim=module.dim, grid=grid)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        batch, tokens, channels = x.shape
        (height, width), side = size, self.ws
        picture = F.pad(x.reshape(batch, height, width, channels), (0, 0, 0, -width % side, 0, -height % side))
        rows, columns = picture.shape[1] // side, picture.shape[2] // side
        windows = picture.reshape(batch, rows, side, columns, side, channels).transpose(2, 3)
        windows = windows.reshape(-1, side * side, channels)
        q, k, v = self.project(windows)
        out = self.project_out(self.attend(q, k, v, TokenGrid(side, side), x=windows), q)
        out = out.reshape(batch, rows, columns, side, side, channels).transpose(2, 3)
        out = out.reshape(batch, rows * side, columns * side, channels)[:, :height, :width]
        return self.proj_drop(out.reshape(batch, tokens, channels))


class TwinsGlobalHost(PooledKeysHost, GlobalSubSampleAttn):
    original = GlobalSubSampleAttn
