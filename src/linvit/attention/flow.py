"""Flow-Attention (Flowformer, Wu et al.): attention as a flow from keys (sources) to queries (sinks) that is conserved.

    I = Φ(q) · Σ Φ(k)              O = Φ(k) · Σ Φ(q)               Φ = sigmoid, sums over tokens
    Ī = Φ(q) · Σ Φ(k)/O            Ō = Φ(k) · Σ Φ(q)/I             each normalised by the other side's capacity
    out = σ(Ī·N_q/N_k) ⊙ Φ(q)/I · ( Φ(k)ᵀ · (N_k·softmax(Ō) ⊙ v) )

Sources compete for what they may send (softmax over the keys), sinks gate what they take; 1/I is the row sum of linear
attention. Ō is clamped to [−1, 1] as in both released files, so a competition weight lies between e⁻² and e².

Variants: `vision` (default, the file Flowformer's image models use) adds eps to each of the four flows once more;
`general` (the stand-alone file) does not. They differ by about eps.
"""

from torch import Tensor

from linvit.attention import Call, LinearAttention, Shape, Size, Unnormalised, register
from linvit.attention.options import Eps


def conserved_flows(
    phi_q: Tensor, phi_k: Tensor, *, eps: float, floor: float = 0.0, query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """I, Ī and Ō, `(…, n, 1)` each, summed along the second last axis: tokens here, heads in Mobile-Attention.

    The masks, `(batch, 1, n, 1)`, are true for what takes part in the sums. `floor` is added to every flow.
    """

    def total(x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            x = x.masked_fill(~mask, 0.0)
        return (x.sum(-2) + eps).unsqueeze(-1)

    sinks, sources = phi_q + eps, phi_k + eps
    incoming = sinks @ total(phi_k, key_mask) + floor
    outgoing = sources @ total(phi_q, query_mask) + floor
    conserved_in = sinks @ total(phi_k / outgoing, key_mask) + floor
    conserved_out = sources @ total(phi_q / incoming, query_mask) + floor
    return incoming, conserved_in, conserved_out


@register("flow", paper="Flowformer")
class Flow(LinearAttention):
    variants = ("vision", "general")
    normaliser = Unnormalised()  # the features carry it

    def __init__(self, shape: Shape, *, variant: str | None = None, eps: Eps = 1e-6) -> None:
        super().__init__(shape, variant=variant)
        self.eps = eps

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        phi_q, phi_k = q.sigmoid(), k.sigmoid()
        query_mask, key_mask = (None if m is None else m[:, None, :, None] for m in (call.query_mask, call.mask))
        floor = self.eps if self.variant == "vision" else 0.0
        incoming, conserved_in, conserved_out = conserved_flows(
            phi_q, phi_k, eps=self.eps, floor=floor, query_mask=query_mask, key_mask=key_mask
        )
        ratio = 1.0 if call.one_grid else call.grid.tokens / call.keys
        competition = call.keep(conserved_out.clamp(-1, 1), float("-inf")).softmax(-2) * call.keys
        return phi_q * (conserved_in * ratio).sigmoid() / incoming, phi_k * competition

    def feature_macs(self, size: Size) -> int:
        return size.batch * size.heads * size.head_dim * 2 * (size.queries + size.keys)
