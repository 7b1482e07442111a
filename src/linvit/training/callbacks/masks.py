"""Castling's softmax branch during training: how much of it is left, and its end.

The paper reports that the mask empties by itself. It is annealed to nothing over the last part of the training all the
same, so that the model which is trained is the model that is used: that changes nothing where the mask is empty, and a
mask that looks so need not be. With 197 tokens a share of 0.001 is an entry in every fifth row, of any weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.castling import Castling
from linvit.training.callbacks.callback import Callback, Position


class Masks(Callback):
    """The sparse branches of a model. Nothing here waits for the device."""

    def __init__(self, model: nn.Module, *, anneal: float, steps: int) -> None:
        found = {n: m for n, m in model.named_modules() if isinstance(m, Castling) and m.sparse}
        self.names = [name.removesuffix(".mechanism") for name in found]
        self.kept = [module.kept for module in found.values()]
        self.scales = [module.sparse_scale for module in found.values()]
        self.start, self.steps = round(steps * (1 - anneal)), steps
        self.asleep = False  # in stages that learn what the model does without the branch
        self.history: list[Tensor] = []

    def before_stage(self, at: Position) -> None:
        self.asleep = at.stage.objective != "supervised"  # alignment is to what is left for inference

    def before_step(self, at: Position) -> None:
        """Set the branch's weight for a step."""
        torch._foreach_zero_(self.scales)
        torch._foreach_add_(self.scales, self.scale(at.step))

    def scale(self, step: int) -> float:
        """A half cosine from 1 to 0 over the last part, which the last step reaches; 0 while asleep."""
        if self.asleep:
            return 0.0
        if step < self.start:
            return 1.0
        share = min(1.0, (step + 1 - self.start) / max(1, self.steps - self.start))
        return 0.5 * (1 + math.cos(math.pi * share))

    def after_step(self, at: Position) -> None:
        """Note the share of non-zeros of a step."""
        self.history.append(torch.stack(self.kept))

    def state(self) -> dict[str, Any]:
        """What was noted and not logged yet."""
        return {"kept": torch.stack(self.history).tolist() if self.history else []}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.history = [torch.tensor(row, device=self.kept[0].device) for row in state["kept"]]

    def log(self, step: int) -> dict[str, Any]:
        """The shares of the steps since the last time, `share` as (steps, layers); `step` is how many are done."""
        if not self.history:
            return {}
        taken, self.history = torch.stack(self.history).tolist(), []
        share = [[float(f"{value:.4g}") for value in row] for row in taken]
        first, scale = step - len(taken) + 1, self.scale(step - 1)
        return {"kept": {"layers": self.names, "first_step": first, "share": share, "scale": scale}}
