"""The base of most mechanisms: `out = local(v) + norm(phi(q) · (phi(k)ᵀ · v))`.

A subclass names its feature map and its normaliser; this class derives the reference, the implied map and the MAC
count from them.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from linvit.attention.features import Feature
from linvit.attention.mechanism import Call, Mechanism, Size
from linvit.attention.normalisers import Normaliser


class LinearAttention(Mechanism):
    """Linear attention by a feature map and a normaliser; override `features` for maps with parameters."""

    feature: ClassVar[Feature]
    normaliser: Normaliser

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
