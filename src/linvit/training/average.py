"""The moving average of the weights (EMA), and BatchNorm's statistics measured again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Average:
    """A copy of the model whose weights, and BatchNorm's statistics with them, follow the trained ones slowly. It is a
    model of its own, so that it can be evaluated, saved and learnt from without touching the one in training."""

    def __init__(self, model: nn.Module, decay: float, ramp: float | None = None) -> None:
        self.decay, self.ramp = decay, ramp
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        saved = [(name, value.is_floating_point()) for name, value in model.state_dict().items()]
        averaged = {name for name, floating in saved if floating}
        self._weights: list[list[Tensor]] = [[], []]
        self._buffers: list[list[Tensor]] = [[], []]  # counts, and what is only for the moment
        for side, module in enumerate((self.model, model)):
            self._weights[side] += module.parameters()
            for name, buffer in module.named_buffers():
                (self._weights if name in averaged else self._buffers)[side].append(buffer)

    def decay_at(self, step: int) -> float:
        """The decay after so many steps, near 0 at first where there is a ramp. Without one, a training that is short
        for its decay would show the weights it began with."""
        if self.ramp is None:
            return min(self.decay, (1 + step) / (10 + step))
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
def measure_batch_norm(
    model: nn.Module, batches: Iterable[Tensor], over_processes: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Replace BatchNorm's running statistics by the mean over these batches, and over those of all processes; the rest
    of the model stays in evaluation mode, so that nothing is dropped."""
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
        for statistic in (norm.running_mean, norm.running_var):
            if over_processes is not None and statistic is not None:
                statistic.copy_(over_processes(statistic.clone()))
    model.train(training)
