"""Hydra Attention (Bolya et al.): as many heads as channels.

    out_t = q̂_t ⊙ Σ_s k̂_s ⊙ v_s,  q̂ and k̂ of unit length over all heads' channels together

Each channel is a head of its own with one feature, so its map has rank one and a layer costs O(N·C). Nothing divides by
the number of tokens: the sum, and so the output, grows with N. No official code is known; the formula is that of the
paper as third-party code and Mobile-Attention's ablation use it. eps, the least length a token is divided by, is ours.
"""

from dataclasses import replace

import torch
from torch import Tensor

from linvit.attention import Call, Capabilities, LinearAttention, Shape, Size, Unnormalised, register, regroup
from linvit.attention.options import Eps


@register("hydra", paper="Hydra Attention")
class Hydra(LinearAttention):
    capabilities = Capabilities(normalised=False, wide_values=False)
    shared = {"centre": False}
    normaliser = Unnormalised()

    def __init__(self, shape: Shape, *, eps: Eps = 1e-6) -> None:
        super().__init__(shape)
        self.eps = eps

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return self.direction(q), self.direction(k)

    def direction(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True)
        return regroup(x / length.clamp_min(self.eps), x.shape[1] * x.shape[3])

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return regroup(super().core(q, k, regroup(v, v.shape[1] * v.shape[3]), call), v.shape[1])

    def width(self, head_dim: int) -> int:
        return 1

    def macs(self, size: Size) -> int:
        return super().macs(replace(size, heads=size.heads * size.head_dim, head_dim=1, value_dim=1))
