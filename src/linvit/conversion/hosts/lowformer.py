"""The `ConvAttention` of LowFormer and CPUBone: attention on a picture that a strided convolution has shrunk and a
transposed one enlarges again. Exact for softmax, any input size."""

from __future__ import annotations

from typing import Any

from timm.models import cpubone, lowformer
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import Host, grid_of, to_tokens


class _ShrunkBase(Host):
    small_kernels: Any = False

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.pwise.in_channels)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[0].shape[-2:]
        return TokenGrid(-(-height // module.att_stride), -(-width // module.att_stride))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self.small_kernels and self.att_stride > 1:
            x = F.pad(x, (0, -width % self.att_stride, 0, -height % self.att_stride))
        small = self.conv_proj(x)
        grid = grid_of(small)
        q, k, v = grid.from_map(self.pwise(small), self.num_heads).chunk(3, dim=-1)
        out = self.attend(q, k, v, grid, x=to_tokens(small))
        return self.upsampling(self.o_proj(grid.to_map(out)))[..., :height, :width]


class LowFormerHost(_ShrunkBase, lowformer.ConvAttention):
    original = lowformer.ConvAttention


class CPUBoneHost(_ShrunkBase, cpubone.ConvAttention):
    original = cpubone.ConvAttention
