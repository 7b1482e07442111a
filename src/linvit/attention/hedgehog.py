"""Hedgehog (Zhang et al., The Hedgehog & the Porcupine, 2024): a feature map that learns to mimic softmax.

    φ(x) = [exp(W·x + b), exp(−W·x − b)]                     W and b learned, of their own for queries and keys
    out  = φ(q) · (φ(k)ᵀ · v) / (φ(q) · Σ φ(k))

Exponentials make the map as spiky as softmax's and as monotone in q·k, which other positive features are not: made for
converting a trained model. `exp` (default) is the formula; factors that cancel in the quotient keep it in range, one a
query and one a head for the keys. `softmax` is the form its authors use against overflow: a softmax over each half of
the features. W starts as the identity, here times d^-¼, which is softmax's 1/√d shared by q and k (inferred).
"""

import torch
from torch import Tensor, nn

from linvit.attention import Call, LinearAttention, RowSum, Shape, Size, register
from linvit.attention.options import Eps


@register("hedgehog", paper="The Hedgehog & the Porcupine")
class Hedgehog(LinearAttention):
    variants = ("exp", "softmax")
    needs = ("heads", "head_dim")

    def __init__(self, shape: Shape, *, variant: str | None = None, eps: Eps = 1e-6) -> None:
        super().__init__(shape, variant=variant)
        heads, head_dim = shape.heads or 1, shape.head_dim or 1
        self.normaliser = RowSum(eps)
        start = head_dim**-0.25 * torch.eye(head_dim).repeat(heads, 1, 1)
        self.to_q, self.to_k = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        self.bias_q, self.bias_k = (nn.Parameter(torch.zeros(heads, 1, head_dim)) for _ in range(2))

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q = q @ self.to_q.to(q.dtype) + self.bias_q.to(q.dtype)
        k = k @ self.to_k.to(k.dtype) + self.bias_k.to(k.dtype)
        q, k = torch.cat((q, -q), dim=-1), torch.cat((k, -k), dim=-1)
        if self.variant == "softmax":
            return q.unflatten(-1, (2, -1)).softmax(-1).flatten(-2), k.unflatten(-1, (2, -1)).softmax(-1).flatten(-2)
        q_top = q.amax(-1, keepdim=True).detach()
        k_top = call.keep(k).amax((-2, -1), keepdim=True).detach()
        return (q - q_top).exp(), (k - k_top).exp()

    def width(self, head_dim: int) -> int:
        return 2 * head_dim

    def feature_macs(self, size: Size) -> int:
        return size.batch * size.heads * (size.queries + size.keys) * size.head_dim**2
