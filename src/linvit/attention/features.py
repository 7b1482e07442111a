"""Feature maps: the phi of `phi(q) · (phi(k)ᵀ · v)`, applied along head_dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Feature:
    """A feature map without parameters. `width` is its output size for a given head_dim."""

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def width(self, head_dim: int) -> int:
        return head_dim


class ReLU(Feature):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class EluPlusOne(Feature):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.elu(x) + 1


class Sigmoid(Feature):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


@dataclass(frozen=True)
class Direction(Feature):
    """x / ‖x‖₂"""

    eps: float = 1e-6

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1, eps=self.eps)
