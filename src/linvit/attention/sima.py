"""SimA (Koohpayegani and Pirsiavash): softmax-free attention by L1 norms over the tokens.

    q̂ = q / ‖q‖₁ over tokens, per channel;  k̂ likewise;  out = q̂ · (k̂ᵀ · v)

The product order follows the cheaper side, as in the released code: N < d multiplies q̂ with k̂ᵀ first there. The
reference here keeps the linear order, which gives the same result.
"""

from torch import Tensor

from linvit.attention import Call, LinearAttention, Unnormalised, register


@register("sima", paper="SimA")
class SimA(LinearAttention):
    normaliser = Unnormalised()

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        queries = q if call.query_mask is None else call.keep(q)
        return over_tokens(q, queries), over_tokens(k, call.keep(k))


def over_tokens(x: Tensor, kept: Tensor) -> Tensor:
    """x by the L1 norm over its tokens, of which padded ones are no part."""
    return x / kept.abs().sum(-2, keepdim=True).clamp_min(1e-12)
