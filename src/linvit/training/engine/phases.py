"""A stage with what it minimises, and whether it has something to learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from linvit.conversion.host import Host
from linvit.errors import LinvitError
from linvit.training.config import Config, Stage
from linvit.training.contract import Batch, Objective
from linvit.training.engine.compilation import Step, make_step
from linvit.training.optimisation.optimiser import named_by


@dataclass
class Phase:
    """A stage and what it minimises; `prepare`, where there is one, gets an epoch's batches before the first step.
    `compiled` is the step's compiled form: another run of the same model finds it here and compiles nothing."""

    stage: Stage
    objective: Objective
    prepare: Callable[[Iterator[Batch]], object] | None = None
    compiled: Step | None = None

    def step(self, objective: Objective, model: nn.Module, config: Config, device: torch.device) -> Step:
        """The step that minimises this objective. It is kept unless the objective is a run's own, as with MESA, which
        learns from that run's average."""
        if objective is not self.objective:
            return make_step(objective, model, config, device)
        if self.compiled is None:
            self.compiled = make_step(objective, model, config, device)
        return self.compiled


def check_trainable(model: nn.Module, config: Config) -> None:
    """Whether each stage has something to learn, and Muon a matrix to move: better known now than when it begins."""
    for stage in config.plan_of_stages():
        if named_by(model, stage.trainable):
            continue
        if stage.trainable in ("attention", "mechanism") and not any(isinstance(m, Host) for m in model.modules()):
            raise LinvitError(f"stage {stage.name} trains converted layers, and the model has none: give --plan")
        raise LinvitError(
            f"stage {stage.name}: no parameter of the model is '{stage.trainable}', so nothing would learn: "
            f"set stages.{stage.name}.trainable to what there is, or to all"
        )
    meant = named_by(model, config.muon) if config.optimiser == "muon" else None
    if meant is not None and not any(id(p) in meant and p.ndim == 2 for p in model.parameters()):
        raise LinvitError(f"muon={config.muon}: no matrix of the model is called so: set muon=all, or optimiser=adamw")
