"""SimA (Koohpayegani and Pirsiavash): softmax-free attention by L1 norms over the tokens.

    q̂ = q / ‖q‖₁ over tokens, per channel;  k̂ likewise;  out = q̂ · (k̂ᵀ · v)

The product order follows the cheaper side, as in the released code: N < d multiplies q̂ with k̂ᵀ first there. The
reference here keeps the linear order, which gives the same result.
"""

from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Call, LinearAttention, Unnormalised, register


@register("sima", paper="SimA")
class SimA(LinearAttention):
    normaliser = Unnormalised()

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return F.normalize(q, p=1, dim=-2, eps=1e-12), F.normalize(call.keep(k), p=1, dim=-2, eps=1e-12)
