"""What the engine asks of its data and of its losses: two small protocols, so that neither knows the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn


class BatchSource(Protocol):
    """Where batches come from. The same epoch gives the same batches, augmentation included, however often it is asked
    for: a resumed run sees what the uninterrupted one would have seen."""

    batches: int
    """Steps per epoch for this process."""

    images: int
    """Images per epoch over all processes."""

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and targets on the training device; `skip` leaves out the first batches cheaply, and not `mixed`
        leaves out mixup and cutmix."""
        ...


class Objective(Protocol):
    """What a step minimises, such as cross entropy, distillation or attention alignment."""

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The loss under "loss"; other entries are logged. Nothing here may wait for the device."""
        ...
