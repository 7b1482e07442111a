"""MESA, as EfficientViT trains its large models: from some step on, the model also learns what the moving average of
its own weights says. The papers' formula is `ratio · BCE(model, sigmoid(average))`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from linvit.training.callbacks.average import Average
from linvit.training.callbacks.callback import Callback, Position
from linvit.training.config import Config
from linvit.training.contract import Batch, Objective
from linvit.training.objectives.supervised import logits_of
from linvit.training.processes import Processes


class Mesa(Callback, Objective):
    """An objective around that of supervised stages; its `variant` is whether its time has come."""

    hook: RemovableHandle | None = None
    output: Tensor | None = None

    def __init__(self, config: Config, model: nn.Module, average: Average, processes: Processes) -> None:
        self.config, self.model, self.average, self.processes = config, model, average, processes

    def wrap(self, objective: Objective, at: Position) -> Objective:
        self.close()
        if at.stage.objective != "supervised":
            return objective
        self.objective, self.teacher, self.distance = objective, objective.teacher, objective.distance
        self.hook = self.model.register_forward_hook(self.see)
        return self

    def see(self, model: nn.Module, args: Any, out: Any) -> None:
        """Keep the model's output, so that it need not run twice."""
        out = getattr(out, "logits", out)
        self.output = out[0] if isinstance(out, tuple | list) else out

    def repeated(self, model: nn.Module) -> list[nn.Module]:
        return self.objective.repeated(model)

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        entries = self.objective(model, batch)
        if not self.variant or self.output is None:
            return {**entries, "mesa": entries["loss"].detach() * 0}
        with torch.no_grad():
            wanted = logits_of(self.average.model(batch[0])).sigmoid()
        mesa = F.binary_cross_entropy_with_logits(self.output, wanted)
        return {**entries, "loss": entries["loss"] + self.config.mesa * mesa, "mesa": mesa.detach()}

    def before_step(self, at: Position) -> None:
        self.variant = at.progress >= self.config.mesa_start

    def after_step(self, at: Position) -> None:
        """What the average says has BatchNorm's statistics in it, which each process measures on its own images: all
        take the first one's."""
        if self.hook is not None:
            self.processes.broadcast(self.average.model.buffers())

    def close(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = self.output = None
