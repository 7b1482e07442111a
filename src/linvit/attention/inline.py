"""InLine attention (Han et al., "Bridging the Divide", NeurIPS 2024): injective linear attention with a local residual.

    weight_ij = ( s·φ(q_i)·φ(k_j) − s·φ(q_i)·mean φ(k) + 1 ) / N,  s = d^-½
    out       = weight · v + conv3×3(v),  its kernel made from each picture's own input

The weights are normalised by subtraction: rows sum to one without a division, so queries of one direction and
different lengths stay apart. Subtracting the mean is the same as centring the keys, which is how it is computed; with
φ = identity, the default of the code, the linear part is ViTALiTy's first-order Taylor attention. `kernel` names the
code's other φ: relu, leaky_relu (0.01) and exp (of 0.2·t, of 30 at most: float32 has to hold its products).

The residual's kernel is G2(GELU(G1(mean of the block's input over all tokens))), both maps grouped by heads; it acts on
patches only. With pooled keys v is resized to the queries first (inferred).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Constant, LinearAttention, Shape, Size, register
from linvit.attention.local import ImageFilters, run
from linvit.errors import LinvitError

KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "exp": lambda x: torch.exp((0.2 * x).clamp(max=30.0)),
}


@register("inline", paper="InLine")
class InLine(LinearAttention):
    capabilities = Capabilities(grid=True, equivariant=False, input=True)
    needs = ("heads", "head_dim")
    normaliser = Constant(lambda keys, head_dim: 1 / keys)
    examples = ({}, {"kernel": "exp"})

    def __init__(self, shape: Shape, *, kernel: Literal["identity", "relu", "leaky_relu", "exp"] = "identity") -> None:
        super().__init__(shape)
        heads, channels = shape.heads or 1, shape.channels
        if channels % heads:
            raise LinvitError(f"inline groups the block's {channels} channels by {heads} heads, which do not divide")
        self.phi = KERNELS[kernel]
        self.capabilities = replace(self.capabilities, rotary="products" if kernel == "identity" else "features")
        self.residual = nn.Sequential(
            nn.Conv2d(channels, channels, 1, groups=heads),
            nn.GELU(),
            nn.Conv2d(channels, 9 * heads * shape.values, 1, groups=heads),
        )

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        phi_q, phi_k = self.phi(q) * q.shape[-1] ** -0.5, self.phi(k)
        phi_k = phi_k - call.keep(phi_k).sum(-2, keepdim=True) / call.keys
        return F.pad(phi_q, (0, 1), value=1.0), F.pad(phi_k, (0, 1), value=1.0)

    def width(self, head_dim: int) -> int:
        return head_dim + 1

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        assert call.x is not None
        kernels = (
            run(self.residual, call.mean(call.x.to(out.dtype))[:, :, None, None]).flatten(1).unflatten(1, (-1, 3, 3))
        )
        return ImageFilters(kernels).add(out, v, call)

    def macs(self, size: Size) -> int:
        inputs, outputs = self.shape.channels, size.heads * size.value_dim
        kernel = inputs * (inputs + 9 * outputs) // size.heads
        return super().macs(size) + size.batch * (kernel + 9 * outputs * size.grid.patches)
