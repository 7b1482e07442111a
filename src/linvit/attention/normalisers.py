"""Normalisers: the factor that each query's output is multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from linvit.attention.mechanism import Call


@dataclass(frozen=True)
class Normaliser:
    """A factor per query, `(batch, heads, queries, 1)` or anything that broadcasts to it."""

    def __call__(self, phi_q: Tensor, phi_k: Tensor, head_dim: int, call: Call) -> Tensor | float:
        raise NotImplementedError

    def kernel(self, keys: int, head_dim: int) -> dict[str, Any] | None:
        """The same in the words of the fused kernel's formula, for `keys` keys; None where it has none."""
        return None

    def under_mask(self, call: Call, head_dim: int) -> Tensor | float:
        """What the kernel's output is still to be multiplied with because a mask leaves fewer keys."""
        return 1.0

    def macs_per_query(self, width: int) -> int:
        """Multiply-accumulates for one query of one head, `width` features wide."""
        return 0


@dataclass(frozen=True)
class RowSum(Normaliser):
    """1 / (phi(q) · Σ phi(k) + eps): every row of the implied map sums to one. A row without a match goes to zero."""

    eps: float = 1e-6

    def __call__(self, phi_q: Tensor, phi_k: Tensor, head_dim: int, call: Call) -> Tensor:
        return 1 / (phi_q @ phi_k.sum(-2).unsqueeze(-1) + self.eps)

    def kernel(self, keys: int, head_dim: int) -> dict[str, Any] | None:
        return {"row_sum": True, "eps": self.eps}

    def macs_per_query(self, width: int) -> int:
        return width


@dataclass(frozen=True)
class Constant(Normaliser):
    """A constant of the number of keys and the head_dim: nothing to divide by, nothing to blow up."""

    factor: Callable[[int | Tensor, int], Tensor | float]

    def __call__(self, phi_q: Tensor, phi_k: Tensor, head_dim: int, call: Call) -> Tensor | float:
        return self.factor(call.keys, head_dim)

    def kernel(self, keys: int, head_dim: int) -> dict[str, Any] | None:
        return {"scale": float(self.factor(keys, head_dim))}

    def under_mask(self, call: Call, head_dim: int) -> Tensor | float:
        return self.factor(call.keys, head_dim) / self.factor(call.key_grid.tokens, head_dim)


class Unnormalised(Normaliser):
    def __call__(self, phi_q: Tensor, phi_k: Tensor, head_dim: int, call: Call) -> float:
        return 1.0

    def kernel(self, keys: int, head_dim: int) -> dict[str, Any] | None:
        return {}
