"""Performer (Choromanski et al.): positive random features whose inner products average to the softmax kernel.

    exp(q·k/√d) = E_w[ψ(q)·ψ(k)],  ψ(x) = exp(W·x' − ‖x'‖²/2)/√m,  x' = x/d^¼

    favor  m = ⌊d ln d⌋, W shared by the heads, in orthogonal blocks whose rows have the norms of Gaussian vectors.
           ψ is shifted by the largest W·x' (per query; over all keys) and gets 1e-4 added, as in the released code.
    fair   the Fair Comparison's PA: m = d/2, W per head with rows of norm √m, no shift, 1e-6 added to the row sum.

The default is `favor`, the authors' own. Its 1e-4 comes after the shift and so pulls the map towards a plain mean, the
more the longer x' and the larger m: its error against softmax has a floor, which eps = 0 takes away. `fair` instead
sends a query to zero when the row sum falls under its eps, as long queries and keys do. Its exponent is at most
‖w‖²/2 = m/2, hence no overflow in float32 up to d = 128 without a shift. As √m is not the length of a Gaussian vector,
its features do not average to the softmax kernel.

W is a buffer, saved and never trained. The papers may draw it anew during training: call `redraw()`; the Fair
Comparison never does. Ours: the signs of the QR factors are fixed, without which a block's first rows would all point
into one half-space and the estimate would be biased; the gradient passes through the shift, which the released code
detaches (the shift cancels up to the 1e-4).
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from linvit.attention import Call, Capabilities, LinearAttention, RowSum, Shape, Size, register
from linvit.attention.options import Eps, Range

Features = Annotated[int, Range(1, 65536)]


@register("performer", paper="Performer; Fair Comparison (PA)")
class Performer(LinearAttention):
    """`features` sets m; `eps` is what is added to the features (favor) or to the row sum (fair)."""

    variants = ("favor", "fair")
    needs = ("heads", "head_dim")
    capabilities = Capabilities()  # its features belong to no channels that rotary position could turn
    shared = {"centre": False}
    projection: Tensor

    def __init__(
        self, shape: Shape, *, variant: str | None = None, features: Features | None = None, eps: Eps | None = None
    ) -> None:
        super().__init__(shape, variant=variant)
        assert shape.heads and shape.head_dim
        favor, d = self.variant == "favor", shape.head_dim
        self.count = features or max(1, int(d * math.log(d)) if favor else d // 2)
        self.eps = eps if eps is not None else 1e-4 if favor else 1e-6
        self.normaliser = RowSum(0.0 if favor else self.eps)
        self.register_buffer("projection", torch.empty(1 if favor else shape.heads, self.count, d))
        self.redraw()

    @torch.no_grad()
    def redraw(self) -> None:
        """New random rows, for all heads."""
        for head in self.projection:
            rows = orthogonal_rows(self.count, head.shape[1])
            gaussian = self.variant == "favor"
            norms = torch.randn(self.count, head.shape[1]).norm(dim=1, keepdim=True) if gaussian else self.count**0.5
            head.copy_(rows * norms)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        (q_rows, q_square), (k_rows, k_square) = self.project(q), self.project(k)
        if self.variant == "fair":
            factor = math.log(self.count) / 2  # m^-½, in the exponent
            return (q_rows - (q_square + factor)).exp(), (k_rows - (k_square + factor)).exp()
        largest = call.keep(k_rows, float("-inf")).amax((-2, -1), keepdim=True)
        phi_q = (q_rows - q_square - q_rows.amax(-1, keepdim=True)).exp() + self.eps
        phi_k = call.keep(k_rows - k_square - largest).exp() + self.eps
        return phi_q * self.count**-0.5, phi_k * self.count**-0.5

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W·x and ‖x‖²/2 of x·d^-¼."""
        scale = x.shape[-1] ** -0.25
        rows = x @ (self.projection.to(x.dtype) * scale).transpose(-2, -1)
        return rows, torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() * (scale**2 / 2)

    def width(self, head_dim: int) -> int:
        return self.count

    def feature_macs(self, size: Size) -> int:
        return size.batch * size.heads * (size.queries + size.keys) * size.head_dim * self.count


def orthogonal_rows(count: int, dim: int) -> Tensor:
    """`count` unit vectors, each uniform on the sphere, orthogonal in blocks of `dim`."""
    blocks = []
    for _ in range(-(-count // dim)):
        block, triangle = torch.linalg.qr(torch.randn(dim, dim))
        blocks.append((block * triangle.diagonal().sign()).T)
    return torch.cat(blocks)[:count]
