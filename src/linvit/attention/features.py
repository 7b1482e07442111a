"""Feature maps: the phi of `phi(q) · (phi(k)ᵀ · v)`, applied along head_dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Feature:
    """A feature map without parameters. `width` is its output size for a given head_dim."""

    kernel: ClassVar[str | None] = None  # what the fused kernel calls it, where it has it
    eps: ClassVar[float] = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def width(self, head_dim: int) -> int:
        return head_dim


class ReLU(Feature):
    kernel = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class EluPlusOne(Feature):
    kernel = "elu_plus_one"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.elu(x) + 1


class Sigmoid(Feature):
    kernel = "sigmoid"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


@dataclass(frozen=True)
class Direction(Feature):
    """x / ‖x‖₂"""

    kernel = "direction"
    eps: float = 1e-6  # type: ignore[misc]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1, eps=self.eps)
