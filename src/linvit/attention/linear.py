"""The base of most mechanisms: `out = local(v) + norm(phi(q) · (phi(k)ᵀ · v))`.

A subclass names its feature map and its normaliser; this class derives the reference, the implied map, the MAC count
and the use of the fused kernel from them. A feature map that the kernel has runs inside it; any other runs in PyTorch
and its features go through the kernel as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linvit.attention.features import Feature
from linvit.attention.grid import TokenGrid
from linvit.attention.mechanism import Call, Mechanism, Shape, Size, lift
from linvit.attention.normalisers import Normaliser
from linvit.errors import LinvitError
from linvit.kernels import linear as kernel
from linvit.kernels.fused import plain, signature_of, unserved


@dataclass(frozen=True)
class Fusion:
    """A call as the kernel takes it: with what q and k it computes which formula."""

    q: Tensor
    k: Tensor
    formula: kernel.Formula
    constant: Tensor | None = None  # added to every product of a query and a key

    def plain(self, q: Tensor, k: Tensor) -> bool:
        """Whether the kernel takes q and k as they are, and a formula that shapes and options alone decide."""
        return self.q is q and self.k is k and self.constant is None


MOST_SERVED = 256  # shapes that a mechanism remembers; a service may see any number of them
UNKNOWN: tuple[str, TokenGrid | None, Any] = ("", None, None)


class LinearAttention(Mechanism):
    """Linear attention by a feature map and a normaliser; override `features` for maps with parameters."""

    feature: Feature
    normaliser: Normaliser

    def __init__(self, shape: Shape, *, variant: str | None = None) -> None:
        super().__init__(shape, variant=variant)
        self.served: dict[tuple[Any, ...], tuple[str, TokenGrid, kernel.Formula]] = {}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid | None = None,
        *,
        key_grid: TokenGrid | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Attend; by the short way where a call like this one was checked and is nothing but the kernel's formula.

        The checks take the host longer than the launch, and at small sizes the host is what one waits for.
        """
        if key_grid is None and mask is None and bias is None and self.served and plain(q):
            signature = signature_of(q, k, v)
            impl, known, formula = self.served.get(signature, UNKNOWN)
            if impl == self.impl and (grid is known or grid is None or grid == known):
                return kernel.op(q, k, v, None, None, formula, signature)
        return super().forward(q, k, v, grid, key_grid=key_grid, mask=mask, bias=bias, x=x)

    def remember(self, q: Tensor, k: Tensor, v: Tensor, call: Call, fusion: Fusion) -> None:
        """Let calls like this one take the short way, if the kernel does all there is to do."""
        nothing_else = type(self).finish is Mechanism.finish and type(self).finish_fused is LinearAttention.finish_fused
        nothing_else = nothing_else and not (self.capabilities.grid or self.capabilities.input)
        if nothing_else and fusion.plain(q, k) and call.mask is None and call.grid == call.key_grid and plain(q):
            if len(self.served) >= MOST_SERVED:
                self.served.clear()
            self.served[signature_of(q, k, v)] = (self.impl, call.grid, fusion.formula)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """phi(q) and phi(k); masked keys are zeroed afterwards."""
        return self.feature(q), self.feature(k)

    def width(self, head_dim: int) -> int:
        """How many features a head has."""
        return self.feature.width(head_dim)

    def feature_macs(self, size: Size) -> int:
        """Multiply-accumulates of the feature map itself."""
        return 0

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        phi_q, phi_k = self.features(q, k, call)
        phi_k = call.keep(phi_k)
        out = phi_q @ (phi_k.transpose(-2, -1) @ v)
        return out * self.normaliser(phi_q, phi_k, q.shape[-1], call)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        phi_q, phi_k = self.features(q, k, call)
        phi_k = call.keep(phi_k)
        return phi_q @ phi_k.transpose(-2, -1) * self.normaliser(phi_q, phi_k, q.shape[-1], call)

    def macs(self, size: Size) -> int:
        width = self.width(size.head_dim)
        products = (size.keys + size.queries) * width * size.value_dim
        norm = size.queries * self.normaliser.macs_per_query(width)
        return size.batch * size.heads * (products + norm) + self.feature_macs(size)

    def fusion(self, q: Tensor, k: Tensor, call: Call) -> Fusion | str:
        """The call as the kernel takes it, or why it cannot."""
        norm = self.normaliser.kernel(k.shape[2], q.shape[-1])
        if norm is None or type(self).core is not LinearAttention.core:
            return "it computes more than the kernel's formula"
        if type(self).features is LinearAttention.features and self.feature.kernel is not None:
            return Fusion(q, k, kernel.Formula(self.feature.kernel, feature_eps=self.feature.eps, **norm))
        if self.width(q.shape[-1]) > kernel.WIDEST[q.dtype.itemsize]:
            return f"its {self.width(q.shape[-1])} features per head are too many"
        phi_q, phi_k = self.features(lift(q), lift(k), call)
        return Fusion(phi_q, phi_k, kernel.Formula("identity", **norm))

    def finish_fused(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """`finish`, less what of it the kernel did."""
        return self.finish(out, q, k, v, call)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        why = unserved(q, k, v)
        fusion = self.fusion(q, k, call) if why is None else why
        if not isinstance(fusion, str):
            # Features computed outside come in float32, and float16 has too small a range for them.
            dtype = torch.float32 if fusion.q.dtype != v.dtype and v.dtype == torch.float16 else v.dtype
            q_, k_, v_ = (t.to(dtype) for t in (fusion.q, fusion.k, v))
            why = kernel.why_not(q_, k_, v_, fusion.formula)
            if why is None:
                self.remember(q, k, v, call, fusion)
                out = kernel.linear_attention(q_, k_, v_, fusion.formula, call.mask, fusion.constant)
                if call.mask is not None:
                    out = out * self.normaliser.under_mask(call, q.shape[-1])
                return self.finish_fused(out.to(v.dtype), q, k, v, call).to(v.dtype)
        if self.impl == "triton":
            raise LinvitError(f"{self.name} cannot run on the Triton kernel: {why or fusion}")
        return self.by_map(q, k, v, call)

    def by_map(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        """The products in the other order, where that is cheaper: with few tokens the N×N map is small."""
        queries, keys, width, values = q.shape[2], k.shape[2], self.width(q.shape[-1]), v.shape[-1]
        cheaper = queries * keys * (width + values) < (queries + keys) * width * values
        if not cheaper or type(self).core is not LinearAttention.core:
            return None
        dtype = v.dtype
        q, k, v = lift(q), lift(k), lift(v)
        return self.finish(self.implied_map(q, k, call) @ v, q, k, v, call).to(dtype)
