"""Efficient Attention (Shen et al.), the Fair Comparison's EA.

    out = softmax_d(q) · (softmax_N(k)ᵀ · v)

The softmax over a head's channels makes each query's features sum to one, the softmax over tokens each key channel's:
rows of the implied map sum to one with nothing to divide by. No scale, no temperature.

    factorised   out = q / √d · (softmax_N(k)ᵀ · v)

is CoaT's factorised attention (Xu et al.), which leaves the query as it is.

In the fused kernel both softmaxes run inside: a key channel's exponentials, less their largest, go into the state and
their sum divides it afterwards.
"""

from torch import Tensor

from linvit.attention import Call, Formula, Fusion, LinearAttention, Unnormalised, register


@register("efficient", paper="Efficient Attention; Fair Comparison (EA); CoaT")
class Efficient(LinearAttention):
    normaliser = Unnormalised()
    variants = ("softmax", "factorised")
    examples = ({}, {"variant": "factorised"})

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        query = q.softmax(-1) if self.variant == "softmax" else q * q.shape[-1] ** -0.5
        return query, call.keep(k, float("-inf")).softmax(-2)

    def fusion(self, q: Tensor, k: Tensor, call: Call) -> Fusion | str:
        if self.variant == "softmax":
            return Fusion(q, k, Formula("softmax"))
        return Fusion(q, k, Formula("key_softmax", scale=q.shape[-1] ** -0.5))
