"""A stage with what it minimises, as one function of a batch that is compiled once and serves run after run.

Compiled block by block: a transformer repeats one block, so compiling that one serves them all. It takes seconds where
a whole step takes a minute, and is nearly as fast, since what there is to fuse lies inside the blocks. Alignment calls
the attention layers on their own and hooks into the blocks, so there the layers are what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linvit.training.config import Config, Stage
from linvit.training.contract import Batch, Objective

LIMIT = 64  # forms of one block that the compiler may keep: stages of a pyramid, teacher and student
Step = Callable[[Batch], dict[str, Tensor]]


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


def compiles(config: Config, device: torch.device) -> bool:
    """Whether steps are compiled by this config on this device."""
    return config.compile != "off" and (config.compile != "auto" or device.type == "cuda")


def make_step(objective: Objective, model: nn.Module, config: Config, device: torch.device) -> Step:
    """An objective as one function of a batch, teacher and loss included, compiled where the config says so. It holds
    on to nothing else of a run."""

    def step(batch: Batch) -> dict[str, Tensor]:
        return objective(model, batch)

    if not compiles(config, device):
        return step
    by_blocks = config.compile in ("auto", "blocks")
    models = [model] if objective.teacher is None else [model, objective.teacher.model]
    modules = [module for each in models for module in objective.repeated(each)] if by_blocks else []
    modules += [objective.distance] if modules and objective.distance is not None else []
    if len(modules) < 2:
        return torch.compile(step, mode="default" if by_blocks else config.compile)
    forwards = [(module, torch.compile(module.forward, dynamic=False)) for module in modules]

    def step_by_blocks(batch: Batch) -> dict[str, Tensor]:
        with compiled_forwards(forwards):
            return objective(model, batch)

    return step_by_blocks


@contextmanager
def compiled_forwards(forwards: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Modules have a compiled forward inside only: what else calls them, an evaluation say, has other shapes and modes
    and is not worth compiling."""
    own = [(module, vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        with torch._dynamo.config.patch(recompile_limit=LIMIT):
            yield
    finally:
        for module, before in own:
            if before is None:
                vars(module).pop("forward", None)
            else:
                module.forward = before
