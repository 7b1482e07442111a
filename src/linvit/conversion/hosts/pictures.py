"""Pictures, channels first or last: the whole of them, a part of their channels, or what a convolution made of them."""

from typing import Any

import torch
from timm.layers import Attention2d
from timm.models import cpubone, fastvit, lowformer, visformer, volo
from timm.models.efficientvit_mit import LiteMLA
from timm.models.iformer import SHMA
from timm.models.shvit import SHSA
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import CLOSED, ChannelsLastHost, Host, PictureHost, grid_of, to_tokens


class VOLOHost(ChannelsLastHost, volo.Attention):
    """VOLO's self-attention over pictures. Exact for softmax. Its class attention is hosted as CaiT's.

    The outlookers of the first stage have no keys, they predict the weights of 3×3 neighbours from the centre alone,
    and stay.
    """

    def forward(self, x: Tensor) -> Tensor:
        grid, x = TokenGrid(x.shape[1], x.shape[2]), x.flatten(1, 2)
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, grid, x=x), q).unflatten(1, (grid.height, grid.width))


class FastViTHost(PictureHost, fastvit.Attention):
    """FastViT's attention over pictures, in its last stage. Exact for softmax, any input size. The stages that mix
    tokens by convolution stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = to_tokens(x)
        q, k, v = self.project(tokens)
        return self.project_out(self.attend(q, k, v, grid_of(x), x=tokens), q).transpose(1, 2).reshape(x.shape)


class VisformerHost(PictureHost, visformer.Attention):
    """Visformer's attention over pictures. Exact for softmax. The model around it fixes the input size, as in the
    original."""

    def forward(self, x: Tensor) -> Tensor:
        grid = grid_of(x)
        q, k, v = (grid.from_map(t, self.num_heads) for t in self.qkv(x).chunk(3, dim=1))
        return self.finish(self.proj(grid.to_map(self.attend(q, k, v, grid, x=to_tokens(x)))), q)


class Attention2dHost(PictureHost, Attention2d):
    """The `Attention2d` of timm's layers. Exact for softmax, any input size."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        grid, qkv = grid_of(x), self.qkv(x)
        if self.head_first:
            q, k, v = grid.from_map(qkv, self.num_heads).chunk(3, dim=-1)
        else:
            q, k, v = (grid.from_map(t, self.num_heads) for t in qkv.chunk(3, dim=1))
        return self.finish(self.proj(grid.to_map(self.attend(q, k, v, grid, bias=attn_mask, x=to_tokens(x)))), q)


class EfficientViTHost(PictureHost, LiteMLA):
    """EfficientViT's `LiteMLA` (MIT): multi-scale q, k, v from convolutions, natively with ReLU linear attention.

    Each head's channels are q, k and v in turn; the multi-scale branch doubles the heads.
    """

    native = "relu_linear"
    needs = (CLOSED,)

    @classmethod
    def shape(cls, module: Any) -> Shape:
        heads = module.qkv.conv.out_channels // (3 * module.dim) * (1 + len(module.aggreg))
        return Shape(heads, module.dim, dim=module.qkv.conv.in_channels)

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"eps": module.eps} if mechanism == "relu_linear" else {}

    def forward(self, x: Tensor) -> Tensor:
        grid, qkv = grid_of(x), self.qkv(x)
        picture = torch.cat([qkv, *(branch(qkv) for branch in self.aggreg)], dim=1)
        q, k, v = grid.from_map(picture, picture.shape[1] // (3 * self.dim)).chunk(3, dim=-1)
        return self.proj(grid.to_map(self.attend(q, k, v, grid, x=to_tokens(x))))


class SHViTHost(PictureHost, SHSA):
    """Single-head attention over pictures: SHViT's `SHSA` on a part of the channels, iFormer's gated `SHMA`, whole or
    in windows. Values are wider than keys. Exact for softmax, any input size."""

    needs = (CLOSED,)

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
    needs = (CLOSED,)

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
        return self.proj(grid.to_map(self.attend(q, k, v, grid, x=to_tokens(x))) * gate)

    def forward(self, x: Tensor) -> Tensor:
        side = self.window_size
        if not side:
            return self._mix(x)
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, -width % side, 0, -height % side))
        out = self._mix(self._window_partition(padded, side))
        return self._window_reverse(out, side, *padded.shape[-2:])[:, :, :height, :width]


class _ShrunkBase(Host):
    needs = (CLOSED,)
    small_kernels: Any = False

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return grid_of(args[0], module.att_stride)

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
    """The `ConvAttention` of LowFormer and CPUBone: attention on a picture that a strided convolution has shrunk and a
    transposed one enlarges again. Exact for softmax, any input size."""


class CPUBoneHost(_ShrunkBase, cpubone.ConvAttention):
    pass
