"""XCA, cross-covariance attention (XCiT, El-Nouby et al.): channels attend to channels.

    out = A · v over the channels,  A = softmax(q̂ᵀ · k̂ · τ), d × d, over its last axis

    xcit  q̂, k̂ have unit length over the tokens (per channel); τ is learned per head and starts at 1
    fair  the Fair Comparison's: no norm and no temperature, q̂ᵀ · k̂ · N^-½

The default is XCiT's, text and code agree. The Fair Comparison's poster prints norm and temperature, its code has
neither, and its parameter counts follow the code. τ goes without weight decay; it is one-dimensional, which training
scripts take as the sign for that. A key mask drops tokens from q as well as from k: they are the same tokens.

As no token sees another here, XCiT puts a local patch interaction between attention and MLP (`lpi=True`):

    x + γ · DW3×3(BN(GELU(DW3×3(LN x))))

`xcit` has the LayerScale γ (1 in the 12-layer models, 1e-5 in the 24-layer ones: `lpi_scale`), `fair` has none.
Prefix tokens pass it by. Both sources use a synchronised BatchNorm: convert it where training is distributed.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Mechanism, Shape, Size, TokenGrid, register
from linvit.attention.options import Eps, Number
from linvit.kernels import xca as kernel


@register("xca", paper="XCiT; Fair Comparison (XCA, LPI)")
class CrossCovariance(Mechanism):
    capabilities = Capabilities(unequal=False, wide_values=False, map=False)
    triton = True
    variants = ("xcit", "fair")
    examples = ({}, {"lpi": True}, {"lpi": True, "variant": "fair"})

    def __init__(
        self, shape: Shape, *, variant: str | None = None, lpi: bool = False, lpi_scale: Number = 1.0, eps: Eps = 1e-12
    ) -> None:
        super().__init__(shape, variant=variant)
        self.eps = eps
        if self.variant == "xcit":
            self.require("heads")
            self.temperature = nn.Parameter(torch.ones(shape.heads or 0))
        self.lpi = None
        if lpi:
            if shape.dim is None:
                self.require("heads", "head_dim")
            self.lpi = LocalPatchInteraction(shape.channels, lpi_scale if self.variant == "xcit" else None)
        self.capabilities = replace(self.capabilities, between=lpi)

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k = call.keep(q), call.keep(k)
        if self.variant == "xcit":
            q, k = F.normalize(q, dim=-2, eps=self.eps), F.normalize(k, dim=-2, eps=self.eps)
            scale = self.temperature.to(q.dtype)[:, None, None]
        else:
            keys = call.keys
            scale = (keys.to(q.dtype) if isinstance(keys, Tensor) else keys) ** -0.5
        attention = (q.transpose(-2, -1) @ k * scale).softmax(-1)
        return v @ attention.transpose(-2, -1)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        """On the Triton kernel; or in bfloat16 as it comes: matrix units add in float32, and so do we what is d × d."""
        why = kernel.why_not(q, k, v)
        if why is None:
            temperature = self.temperature if self.variant == "xcit" else None
            return kernel.xca(q, k, v, temperature, eps=self.eps, mask=call.mask)
        if q.dtype != torch.bfloat16 or self.impl == "triton":
            return why
        q, k = call.keep(q), call.keep(k)
        scores = (q.transpose(-2, -1) @ k).float()
        if self.variant == "xcit":
            query, key = (torch.linalg.vector_norm(t, dim=-2, dtype=torch.float32).clamp_min(self.eps) for t in (q, k))
            scores = scores * (self.temperature.float()[:, None, None] / (query.unsqueeze(-1) * key.unsqueeze(-2)))
        else:
            scores = scores * (call.keys.float() if isinstance(call.keys, Tensor) else call.keys) ** -0.5
        return v @ scores.softmax(-1).to(v.dtype).transpose(-2, -1)

    def between(self, x: Tensor, grid: TokenGrid) -> Tensor:
        return x if self.lpi is None else self.lpi(x, grid)

    def macs(self, size: Size) -> int:
        return 2 * size.batch * size.heads * size.keys * size.head_dim**2

    def between_macs(self, size: Size) -> int:
        return 0 if self.lpi is None else self.lpi.macs(size)


class LocalPatchInteraction(nn.Module):
    """XCiT's LPI with its residual, on the residual stream `(batch, tokens, channels)`."""

    def __init__(self, channels: int, scale: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.first = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.batch_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.scale = None if scale is None else nn.Parameter(torch.full((channels,), scale))

    def forward(self, x: Tensor, grid: TokenGrid) -> Tensor:
        prefix, patches = grid.split(x)
        picture = grid.to_map(self.norm(patches).unsqueeze(1))
        local = grid.from_map(self.second(self.batch_norm(F.gelu(self.first(picture)))), 1).squeeze(1)
        if self.scale is not None:
            local = local * self.scale
        return torch.cat((prefix, patches + local.to(x.dtype)), dim=1)

    def macs(self, size: Size) -> int:
        return 2 * 9 * size.batch * size.grid.patches * self.first.in_channels
