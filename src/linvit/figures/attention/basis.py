"""Features as colours: one basis and one scale for all that are shown together, so that a colour means the same."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

EDGE = 0.01  # share of patches that colours may cut off on each side


@dataclass(frozen=True)
class Basis:
    """Principal components of one model's features, and the range that becomes colours."""

    mean: Tensor
    components: Tensor  # (channels, 3)
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Basis":
        """From `(patches, channels)`. The sign of a component is that of its largest weight."""
        mean = features.mean(0)
        _, _, rows = torch.linalg.svd(features - mean, full_matrices=False)
        rows = F.pad(rows, (0, 0, 0, max(0, 3 - len(rows))))[:3]
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        components = (rows * torch.where(largest < 0, -1.0, 1.0)).T
        along = (features - mean) @ components
        low, high = (along.quantile(q, dim=0) for q in (EDGE, 1 - EDGE))
        return cls(mean, components, low, high)

    def colours(self, features: Tensor) -> Tensor:
        """`(patches, 3)`, from 0 to 1."""
        along = (features - self.mean) @ self.components
        return ((along - self.low) / (self.high - self.low).clamp_min(1e-12)).clamp(0, 1)
