"""Efficient Attention (Shen et al.), the Fair Comparison's EA.

    out = softmax_d(q) · (softmax_N(k)ᵀ · v)

The softmax over a head's channels makes each query's features sum to one, the softmax over tokens each key channel's:
rows of the implied map sum to one with nothing to divide by. No scale, no temperature.
"""

from torch import Tensor

from linvit.attention.linear import LinearAttention
from linvit.attention.mechanism import Call
from linvit.attention.normalisers import Unnormalised
from linvit.attention.registry import register


@register("efficient", paper="Efficient Attention; Fair Comparison (EA)")
class Efficient(LinearAttention):
    normaliser = Unnormalised()

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return q.softmax(-1), call.keep(k, float("-inf")).softmax(-2)

    def width(self, head_dim: int) -> int:
        return head_dim
