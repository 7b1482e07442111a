"""Focused linear attention (FLatten Transformer, Han et al., ICCV 2023).

    r    = (relu(x) + 1e-6) / softplus(scale)           for q and for k + position; scale learned per channel
    φ(x) = ‖r‖ · r^p / ‖r^p‖                            p = 3, norms over all heads' channels together
    out  = φ(q) · (φ(k)ᵀ · v) / (φ(q) · Σ φ(k) + N·eps) + conv(v)

The power turns features towards their nearest axis and so sharpens the map; the 5×5 depthwise convolution, its filters
shared by the heads, makes up for the map's low rank. Scale, position and eps are those of the released code, which the
paper's accuracy comes from. eps stands beside the mean over keys there, so a query without an active feature goes to
zero. Prefix tokens have no place on the grid and get neither position nor convolution (inferred).

With pooled keys the code resizes v linearly along the raster order before the convolution; so does this.
"""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, GridConv, LinearAttention, RowSum, Shape, Size, register
from linvit.attention.local import Filter
from linvit.attention.options import ConvWidth, Eps, Range
from linvit.attention.qt import KeyPosition

Power = Annotated[int, Range(1, 32)]


@register("focused", paper="FLatten Transformer")
class Focused(LinearAttention):
    capabilities = Capabilities(grid=True, equivariant=False, rotary="features")
    needs = ("heads", "head_dim", "grid")
    builds_on_grid = True

    def __init__(self, shape: Shape, *, power: Power = 3, kernel_size: ConvWidth = 5, eps: Eps = 1e-6) -> None:
        super().__init__(shape)
        self.power, self.eps = power, eps
        self.normaliser = RowSum(eps, per_key=True)
        self.scale = nn.Parameter(torch.zeros(shape.heads or 1, 1, shape.head_dim or 1))
        self.position = KeyPosition(shape)
        self.local = GridConv(shape.values, kernel_size)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return self.focus(q), self.focus(k + self.position(call.key_grid).to(k.dtype))

    def focus(self, x: Tensor) -> Tensor:
        r = (torch.relu(x) + self.eps) / F.softplus(self.scale.to(x.dtype))
        length = torch.linalg.vector_norm(r, dim=(1, 3), keepdim=True)
        powers = (r / length) ** self.power  # of unit length first: 1e-6 cubed and squared leaves float32's range
        return powers * (length / torch.linalg.vector_norm(powers, dim=(1, 3), keepdim=True))

    @property
    def near(self) -> Filter:
        return self.local

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.key_grid.patches == call.grid.patches:
            return self.add_near(out, v, call)
        _, patches = call.key_grid.split(call.keep(v))
        line = F.interpolate(patches.transpose(2, 3).flatten(0, 1), call.grid.patches, mode="linear")
        patches = line.transpose(1, 2).unflatten(0, v.shape[:2])
        return out + F.pad(self.local(patches, replace(call.grid, prefix=0)), (0, 0, call.grid.prefix, 0))

    def macs(self, size: Size) -> int:
        return super().macs(size) + self.local.macs(size)
