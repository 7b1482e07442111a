"""Castling-ViT (You et al.): attention by the angle between query and key.

    1 − θ/π = ½ + x/π + (1/π)·Σ_{n≥1} (2n)!/(4ⁿ(n!)²(2n + 1))·x^(2n+1),   x = cos θ = q̂·k̂

`angular` is the whole kernel, quadratic in the tokens. `castling` keeps the first two terms and leaves the rest to a
convolution over the tokens and to a softmax branch that exists only in training ("castled" away for inference):

    y   = ½·v + (1/π)·q̂ · (k̂ᵀ · v)  [+ (A ⊙ 1[A > threshold]) · v,  A = softmax(q·kᵀ/√d), in training]
    out = y/‖y‖₂ over the head's channels + conv(v)

This is the released order. The ½ there multiplies the token's own value, not the sum over all values that the kernel
implies, and paper and code agree on that; the L2 norm of y is the only normaliser. Ours, where the release is silent:
eps under the norms; the branch follows `self.training` (the release has a switch and never turns it off by itself); the
threshold is 4/N, which is the release's 0.02 at N = 197 and does not keep everything at N = 49. Inferred: hosts with
pooled keys or subsampled queries take ½·v and the convolution from v brought to the queries' positions.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Mechanism, Shape, Size, TokenConv, lift, register, values_at_queries
from linvit.attention.linear import Constant, Direction, Formula, Fusion, LinearAttention
from linvit.attention.local import Filter
from linvit.attention.options import ConvWidth, Eps
from linvit.kernels import angular as kernel


@register("castling", paper="Castling-ViT")
class Castling(LinearAttention):
    """Linear-angular attention.

    The paper reports that the mask empties by itself. To see it, `kept` holds the share of entries above the threshold
    in the last training step; to make sure of it, anneal the branch with `sparse_scale.fill_(…)` from 1 to 0. Both are
    tensors, so that compiled code neither breaks nor recompiles, and neither is saved.
    """

    capabilities = Capabilities(rotary="products")
    shared = {"centre": False}
    normaliser = Constant(lambda keys, head_dim: 1 / math.pi)
    examples = ({}, {"kernel_size": None}, {"sparse": True})
    kept: Tensor
    sparse_scale: Tensor

    def __init__(
        self, shape: Shape, *, kernel_size: ConvWidth | Literal[0] | None = 9, sparse: bool = False,
        threshold: Eps | None = None, eps: Eps = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.sparse, self.threshold, self.eps = sparse, threshold, eps
        self.feature = Direction(eps)
        self.conv = None
        if kernel_size:
            self.require("heads")
            self.conv = TokenConv(shape.heads or 0, kernel_size)
        if sparse:
            self.register_buffer("sparse_scale", torch.ones(()), persistent=False)
            self.register_buffer("kept", torch.zeros(()), persistent=False)
        self.capabilities = replace(self.capabilities, equivariant=self.conv is None)

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return 0.5 * values_at_queries(call.keep(v), call) + super().core(q, k, v, call)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        keys = k.shape[2]
        own = torch.eye(keys, dtype=k.dtype, device=k.device).expand(*k.shape[:2], keys, keys)
        return 0.5 * values_at_queries(call.keep(own), call) + super().implied_map(q, k, call)

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.sparse and self.training:
            out = out + self.sparse_scale.to(out.dtype) * self.sparse_branch(q, k, v, call)
        return self.add_near(F.normalize(out, dim=-1, eps=self.eps), v, call)

    @property
    def near(self) -> Filter | None:
        return None if self.sparse and self.training else self.conv

    def add_near(self, out: Tensor, v: Tensor, call: Call) -> Tensor:
        return out if self.conv is None or call.filtered else self.conv.add(out, v, call)

    def fusion(self, q: Tensor, k: Tensor, call: Call) -> Fusion | str:
        if not call.one_grid:
            return "its values have to be brought to other positions for the queries"
        norm = not (self.sparse and self.training)  # else the softmax branch goes in before it
        formula = Formula("direction", scale=1 / math.pi, feature_eps=self.eps, own=0.5, norm=norm, norm_eps=self.eps)
        return Fusion(q, k, formula)

    def finish_fused(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.sparse and self.training:
            out = lift(out) + self.sparse_scale * lift(self.sparse_branch(q, k, v, call))
            out = F.normalize(out, dim=-1, eps=self.eps).to(v.dtype)
        return self.add_near(out, v, call)

    def does_all(self) -> bool:
        return not self.sparse

    def sparse_branch(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Masked softmax attention, not renormalised; gradients pass through the kept entries only."""
        scores = lift(q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask[:, None, None, :], float("-inf"))
        attention = scores.softmax(-1)
        above = attention > (4 / call.keys if self.threshold is None else self.threshold)
        with torch.no_grad():
            self.kept.copy_((above.sum(-1, keepdim=True) / call.keys).mean())
        return (attention * above).to(v.dtype) @ v

    def macs(self, size: Size) -> int:
        return super().macs(size) + (self.conv.macs(size) if self.conv is not None else 0)


@register("angular", paper="Castling-ViT")
class Angular(Mechanism):
    """The exact angular kernel, to see what castling's two terms leave out: `weight_ij = 1 − θ_ij/π`.

    `row_sum` (default) divides each row by its sum, the usual normaliser of a positive kernel; `output_norm` is
    castling's L2 norm of the output instead. Neither is in the released code, which has no exact kernel: inferred.
    The cosine stays 1e-7 inside ±1, where the gradient of the angle is infinite.
    """

    capabilities = Capabilities(linear=False, rotary="products")
    triton = True
    variants = ("row_sum", "output_norm")

    def __init__(self, shape: Shape, *, variant: str | None = None, eps: Eps = 1e-6) -> None:
        super().__init__(shape, variant=variant)
        self.eps = eps

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        q, k = F.normalize(q, dim=-1, eps=self.eps), F.normalize(k, dim=-1, eps=self.eps)
        cosine = (q @ k.transpose(-2, -1)).clamp(-1 + 1e-7, 1 - 1e-7)
        weights = 1 - cosine.acos() / math.pi
        if call.mask is not None:
            weights = weights * call.mask[:, None, None, :]
        return weights / (weights.sum(-1, keepdim=True) + self.eps) if self.variant == "row_sum" else weights

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        """The kernel divides by the row sums, which the L2 norm undoes: the output's direction is all it keeps."""
        why = kernel.why_not(q, k, v)
        if why is not None:
            return why
        out = kernel.angular(q, k, v, call.mask, eps=self.eps)
        if self.variant == "row_sum":
            return out
        return F.normalize(lift(out), dim=-1, eps=self.eps / k.shape[2])

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return F.normalize(out, dim=-1, eps=self.eps) if self.variant == "output_norm" else out
