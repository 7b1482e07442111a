"""The moving average of the weights (EMA)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linvit.training.callbacks.callback import Callback, Position

PREFIX = "average."  # of its tensors in checkpoints


class Average(Callback):
    """A copy of the model whose weights, and BatchNorm's statistics with them, follow the trained ones slowly. It is a
    model of its own, so that it can be evaluated, saved and learnt from without touching the one in training."""

    def __init__(self, model: nn.Module, decay: float, ramp: float | None = None) -> None:
        self.decay, self.ramp = decay, ramp
        self.model = self.shown = copy.deepcopy(model).eval().requires_grad_(False)
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
        """Follow the model; `step` counts from 1, and at 0 the average stands where the model stands."""
        if step:
            torch._foreach_lerp_(self._weights[0], self._weights[1], 1 - self.decay_at(step))
        else:
            torch._foreach_copy_(self._weights[0], self._weights[1])
        if self._buffers[0]:
            torch._foreach_copy_(self._buffers[0], self._buffers[1])

    def before_stage(self, at: Position) -> None:
        if at.step == at.start:
            self.update(0)

    def after_step(self, at: Position) -> None:
        self.update(at.step - at.start)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": tensor for name, tensor in self.model.state_dict().items()}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        self.model.load_state_dict(own)
