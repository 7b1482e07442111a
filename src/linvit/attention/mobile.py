"""Mobile-Attention (Yao et al., ICML 2024): linear attention with many small heads that compete.

    I^h = Φ(q^h) · Σ_g Φ(k^g)            O^h = Φ(k^h) · Σ_g Φ(q^g)            Φ = sigmoid, sums over a token's M heads
    Ī^h = Φ(q^h) · Σ_g Φ(k^g)/O^g        Ō^h = Φ(k^h) · Σ_g Φ(q^g)/I^g
    out = σ(Ī) ⊙ Φ(q) · ( Φ(k)ᵀ · (N·softmax_N(Ō) ⊙ v) ) / denominator

It is Flow-Attention with heads in the place of tokens. The host's heads are cut into heads of `small_head_dim`
channels, which makes the cost O(N·D). That size is not published; 2 is inferred from the released file's demo. The sums
pair q and k of one token, so there must be as many keys as queries.

Poster and released code differ, so there are two variants:

    poster    denominator Φ(q) · Σ_j Φ(k_j), the row sum over tokens; Ō as it is
    released  denominator I, the sum over heads at one token; Ō clamped to [−1, 1]

The default is the poster's. I grows with M and the sum it divides with N, so the released output is off by N/M and
right only where M ≈ N (DeiT-S with heads of 2 channels). The mean of Ō over the heads is exactly 1, so the clamp, which
the poster does not print, also stops the gradient of about half of them. The factor N on the softmax is the code's; the
poster prints none, but values would then shrink with N (inferred). The released file also drops 5 % of the projected
output, which is the host's business.

The ablations of the poster's table, all inferred from their names:

    small_head_dim=None                  "vanilla": the host's own wide heads
    competition=False                    "without head competing": no flows, so plain v, the row sum and no σ(Ī)
    competition=False, gate="se"         that, with a squeeze-and-excite gate on the merged output
    competition=False, gate="glu"        that, times the sigmoid of a linear map of the block's input
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add, mul
from typing import Literal

import torch
from torch import Tensor, nn

from linvit.attention import (
    Call,
    Capabilities,
    Formula,
    LinearAttention,
    RowSum,
    Shape,
    Size,
    Unnormalised,
    register,
    regroup,
)
from linvit.attention.flow import conserved_flows
from linvit.attention.local import run
from linvit.attention.mechanism import lift
from linvit.attention.options import Count, Eps
from linvit.errors import LinvitError
from linvit.kernels import linear
from linvit.kernels import mobile as kernel

NARROW = 16  # products of two channels that a small head has at most, for them to be taken one by one


def dot(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    return reduce(add, map(mul, ours, theirs))


@register("mobile", paper="Mobile-Attention")
class Mobile(LinearAttention):
    capabilities = Capabilities()  # no rotary position: its small heads cut through the pairs of channels
    shared = {"centre": False}
    variants = ("poster", "released")
    examples = (
        *({"small_head_dim": small} for small in (2, 4, None)),
        *({"competition": False, "gate": gate} for gate in (None, "se", "glu")),
    )

    def __init__(
        self, shape: Shape, *, variant: str | None = None, small_head_dim: Count | None = 2, competition: bool = True,
        gate: Literal["se", "glu"] | None = None, eps: Eps = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(shape, variant=variant)
        if not competition and self.variant == "released":
            raise LinvitError("variant='released' of mobile divides by the flows: it needs competition=True")
        self.small_head_dim, self.competition, self.gate, self.eps = small_head_dim, competition, gate, eps
        self.row_sum = RowSum(eps)
        if shape.heads and shape.head_dim:
            self.check_values(self.small_heads(shape.heads, shape.head_dim), shape.heads, shape.values)
        self.normaliser = Unnormalised() if competition else self.row_sum
        if gate is not None:
            self.require("heads", "head_dim")
            channels = (shape.heads or 0) * shape.values
            hidden = max(1, channels // 4)
            self.gating: nn.Module = (
                nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels), nn.Sigmoid())
                if gate == "se"
                else nn.Sequential(nn.Linear(shape.channels, channels), nn.Sigmoid())
            )
        self.capabilities = replace(
            self.capabilities, unequal=not competition, normalised=self.variant == "poster", input=gate == "glu"
        )

    def small_heads(self, heads: int, head_dim: int) -> int:
        """How many heads the host's are cut into."""
        small = self.small_head_dim or head_dim
        if heads * head_dim % small:
            raise LinvitError(f"small_head_dim={small} of mobile must divide {heads}·{head_dim} channels of q and k")
        return heads * head_dim // small

    def check_values(self, small_heads: int, heads: int, value_dim: int) -> None:
        if heads * value_dim % small_heads:
            raise LinvitError(f"the {heads}·{value_dim} channels of v do not divide into mobile's {small_heads} heads")

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        heads = self.small_heads(q.shape[1], q.shape[3])
        phi_q, phi_k = regroup(q, heads).sigmoid(), regroup(k, heads).sigmoid()
        if not self.competition:
            return phi_q, phi_k
        flows = conserved_flows(phi_q.transpose(1, 2), phi_k.transpose(1, 2), eps=self.eps)
        incoming, conserved_in, conserved_out = (flow.transpose(1, 2) for flow in flows)
        if self.variant == "released":
            conserved_out = conserved_out.clamp(-1, 1)
            normaliser = 1 / incoming
        else:
            normaliser = self.row_sum(phi_q, call.keep(phi_k), q.shape[-1], call)
        competition = call.keep(conserved_out, float("-inf")).softmax(-2) * call.keys
        return phi_q * conserved_in.sigmoid() * normaliser, phi_k * competition

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        heads = self.small_heads(q.shape[1], q.shape[3])
        self.check_values(heads, v.shape[1], v.shape[3])
        return regroup(super().core(q, k, regroup(v, heads), call), v.shape[1])

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        if self.competition:
            small, released = self.small_head_dim or q.shape[3], self.variant == "released"
            why = kernel.why_not(q, k, v, small)
            if why is None:
                out = kernel.mobile(q, k, v, small, released=released, eps=self.eps, mask=call.mask)
            elif self.impl != "triton" and call.mask is None and small * (small * v.shape[3] // q.shape[3]) <= NARROW:
                out = self.by_channels(lift(q), lift(k), lift(v))
            else:
                return why
        else:
            heads, formula = self.small_heads(q.shape[1], q.shape[3]), Formula("sigmoid", row_sum=True, eps=self.eps)
            small_q, small_k, small_v = (regroup(t, heads) for t in (q, k, v))
            why = linear.why_not(small_q, small_k, small_v, formula)
            if why is not None:
                return why
            out = regroup(linear.linear_attention(small_q, small_k, small_v, formula, call.mask), v.shape[1])
        return self.finish(out, q, k, v, call).to(v.dtype)

    def by_channels(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same by one tensor `(batch, heads, tokens)` for each channel of a small head: products as narrow as a
        head, which fill no vector unit, become sums of products along all tokens."""
        heads = self.small_heads(q.shape[1], q.shape[3])
        self.check_values(heads, v.shape[1], v.shape[3])
        q_, k_, v_ = (t.mT.flatten(1, 2).unflatten(1, (heads, -1)).unbind(2) for t in (q, k, v))
        phi_q, phi_k = [x.sigmoid() for x in q_], [x.sigmoid() for x in k_]
        incoming, outgoing = self.flow(phi_q, phi_k), 1 / self.flow(phi_k, phi_q)
        returning = 1 / incoming
        conserved_in = self.flow(phi_q, [x * outgoing for x in phi_k])
        conserved_out = self.flow(phi_k, [x * returning for x in phi_q])
        if self.variant == "released":
            gate = conserved_in.sigmoid() * returning
            conserved_out = conserved_out.clamp(-1, 1)
        else:
            gate = conserved_in.sigmoid() / (dot(phi_q, [x.sum(-1, keepdim=True) for x in phi_k]) + self.eps)
        weights = conserved_out.softmax(-1) * k.shape[2]
        sinks, sources = [x * gate for x in phi_q], [x * weights for x in phi_k]
        outs = [dot(sinks, [(x * value).sum(-1, keepdim=True) for x in sources]) for value in v_]
        return torch.stack(outs, 2).flatten(1, 2).unflatten(1, (v.shape[1], -1)).mT

    def flow(self, phi: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """(phi + eps) · (the sum of the others over the heads + eps)."""
        totals = [other.sum(1, keepdim=True) + self.eps for other in others]
        return dot(phi, totals) + self.eps * reduce(add, totals)

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.gate is None:
            return out
        merged = out.transpose(1, 2).flatten(2)
        if self.gate == "se":
            gate = run(self.gating, call.mean(merged)).unsqueeze(1)
        else:
            assert call.x is not None
            gate = run(self.gating, call.x.to(out.dtype))
        return (merged * gate).unflatten(2, (out.shape[1], out.shape[3])).transpose(1, 2)

    def feature_macs(self, size: Size) -> int:
        if not self.competition:
            return 0
        dots = 4 if self.variant == "released" else 5
        return dots * size.batch * size.queries * size.heads * size.head_dim

    def macs(self, size: Size) -> int:
        heads = self.small_heads(size.heads, size.head_dim)
        head_dim, channels = size.heads * size.head_dim // heads, size.heads * size.value_dim
        small = replace(size, heads=heads, head_dim=head_dim, value_dim=channels // heads)
        gates = {"se": 2 * channels * max(1, channels // 4), "glu": size.queries * self.shape.channels * channels}
        return super().macs(small) + size.batch * gates.get(self.gate or "", 0)
