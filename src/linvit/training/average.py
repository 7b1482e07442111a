"""The moving average of the weights (EMA), and BatchNorm's statistics measured again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Average:
    """A copy of the model whose weights follow the trained ones slowly. It is a model of its own, so that it can be
    evaluated, saved and learnt from without touching the one in training."""

    def __init__(self, model: nn.Module, decay: float, ramp: float = 0) -> None:
        self.decay, self.ramp = decay, ramp
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._weights: list[list[Tensor]] = [list(module.parameters()) for module in (self.model, model)]
        self._buffers: list[list[Tensor]] = [list(module.buffers()) for module in (self.model, model)]

    def decay_at(self, step: int) -> float:
        """The decay after so many steps: near 0 at first where there is a ramp."""
        return self.decay * (1 - math.exp(-step / self.ramp)) if self.ramp else self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the model; `step` counts from 1."""
        torch._foreach_lerp_(self._weights[0], self._weights[1], 1 - self.decay_at(step))
        if self._buffers[0]:
            torch._foreach_copy_(self._buffers[0], self._buffers[1])

    @torch.no_grad()
    def restart(self) -> None:
        """Stand where the model stands."""
        torch._foreach_copy_(self._weights[0], self._weights[1])
        if self._buffers[0]:
            torch._foreach_copy_(self._buffers[0], self._buffers[1])


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def measure_batch_norm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace BatchNorm's running statistics by the mean over these batches; the rest of the model stays in
    evaluation mode, so that nothing is dropped."""
    norms = [module for module in model.modules() if isinstance(module, NORMS) and module.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    training = model.training
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
        norm.train()
    for batch in batches:
        model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train(training)
