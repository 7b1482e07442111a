"""A stage with what it minimises, as one function of a batch that is compiled once and serves run after run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linvit.conversion.host import Host
from linvit.errors import LinvitError
from linvit.training.blocks import Blocks, parts_of
from linvit.training.config import Config, Stage
from linvit.training.contract import Objective
from linvit.training.optimiser import named_by

Step = Callable[[Tensor, Tensor], dict[str, Tensor]]


@dataclass
class Phase:
    """A stage and what it minimises; `prepare`, where there is one, gets an epoch's batches before the first step.
    `compiled` is the step's compiled form: another run of the same model finds it here and compiles nothing."""

    stage: Stage
    objective: Objective
    prepare: Callable[[Iterator[tuple[Tensor, Tensor]]], object] | None = None
    compiled: Step | None = None

    def step(self, objective: Objective, model: nn.Module, config: Config, device: torch.device) -> Step:
        """An objective as one function of a batch, teacher and loss included, compiled where the config says so. It is
        not kept if the objective is a run's own, as with MESA, which learns from that run's average."""
        if not compiles(config, device):
            return bind(objective, model)
        if self.compiled is not None and objective is self.objective:
            return self.compiled
        parts = parts_of(objective, model) if config.compile in ("auto", "blocks") else []
        step: Step
        if len(parts) > 1:
            step = by_blocks(objective, model, Blocks(parts))
        else:
            mode = "default" if config.compile in ("auto", "blocks") else config.compile
            step = torch.compile(bind(objective, model), mode=mode)
        if objective is self.objective:
            self.compiled = step
        return step


def check_trainable(model: nn.Module, stages: Iterable[Stage]) -> None:
    """Whether each stage has something to learn: better known now than when it begins."""
    for stage in stages:
        if named_by(model, stage.trainable):
            continue
        if stage.trainable in ("attention", "mechanism") and not any(isinstance(m, Host) for m in model.modules()):
            raise LinvitError(f"stage {stage.name} trains converted layers, and the model has none: give --plan")
        raise LinvitError(
            f"stage {stage.name}: no parameter of the model is '{stage.trainable}', so nothing would learn: "
            f"set stages.{stage.name}.trainable to what there is, or to all"
        )


def check_muon(model: nn.Module, config: Config) -> None:
    """Whether Muon has a matrix to move."""
    if config.optimiser != "muon":
        return
    meant = named_by(model, config.muon)
    if not any(id(parameter) in meant and parameter.ndim == 2 for parameter in model.parameters()):
        raise LinvitError(f"muon={config.muon}: no matrix of the model is called so: set muon=all, or optimiser=adamw")


def bind(objective: Objective, model: nn.Module) -> Step:
    """A function of the batch alone, which holds on to nothing else of a run."""

    def step(images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return objective(model, images, targets)

    return step


def by_blocks(objective: Objective, model: nn.Module, blocks: Blocks) -> Step:
    """The same with the model's and the teacher's blocks compiled."""

    def step(images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        with blocks.at_work():
            return objective(model, images, targets)

    return step


def compiles(config: Config, device: torch.device) -> bool:
    """Whether steps are compiled by this config on this device."""
    return config.compile != "off" and (config.compile != "auto" or device.type == "cuda")
