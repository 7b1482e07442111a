"""MESA, as EfficientViT trains its large models: from some step on, the model also learns what the moving average of
its own weights says. The papers' formula is `ratio · BCE(model, sigmoid(average))`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.training.callbacks.average import Average
from linvit.training.callbacks.callback import Callback, Position
from linvit.training.config import Config
from linvit.training.contract import Batch, Objective
from linvit.training.objectives.supervised import logits_of
from linvit.training.processes import Processes


class Mesa(Callback):
    """Adds the loss to supervised stages. What the average says has BatchNorm's statistics in it, which each process
    measures on its own images, so all take the first one's."""

    def __init__(self, config: Config, model: nn.Module, average: Average, processes: Processes) -> None:
        self.config, self.model, self.average, self.processes = config, model, average, processes
        self.objective: MesaObjective | None = None

    def wrap(self, objective: Objective, at: Position) -> Objective:
        self.close()
        if at.stage.objective != "supervised":
            return objective
        self.objective = MesaObjective(objective, self.model, self.average.model, self.config.mesa)
        return self.objective

    def before_step(self, at: Position) -> None:
        if self.objective is not None:
            self.objective.variant = at.progress >= self.config.mesa_start

    def after_step(self, at: Position) -> None:
        if self.objective is not None:
            self.processes.broadcast(self.average.model.buffers())

    def close(self) -> None:
        if self.objective is not None:
            self.objective.close()
            self.objective = None


class MesaObjective(Objective):
    """An objective around another; its `variant` is whether MESA's time has come."""

    variant: bool = False

    def __init__(self, objective: Objective, model: nn.Module, average: nn.Module, ratio: float) -> None:
        self.objective, self.average, self.ratio = objective, average, ratio
        self.teacher, self.distance = objective.teacher, objective.distance
        self.output: Tensor | None = None
        self.hook = model.register_forward_hook(self.see)

    def see(self, model: nn.Module, args: Any, out: Any) -> None:
        """Keep the model's output, so that it need not run twice."""
        out = getattr(out, "logits", out)
        self.output = out[0] if isinstance(out, tuple | list) else out

    def repeated(self, model: nn.Module) -> list[nn.Module]:
        return self.objective.repeated(model)

    def reset(self) -> None:
        self.objective.reset()

    def close(self) -> None:
        self.hook.remove()
        self.output = None

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        entries = self.objective(model, batch)
        if not self.variant or self.output is None:
            return {**entries, "mesa": entries["loss"].detach() * 0}
        with torch.no_grad():
            wanted = logits_of(self.average(batch[0])).sigmoid()
        mesa = F.binary_cross_entropy_with_logits(self.output, wanted)
        return {**entries, "loss": entries["loss"] + self.ratio * mesa, "mesa": mesa.detach()}
