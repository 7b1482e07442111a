"""A model, data and a recipe brought together for the engine: what is the same for every task."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from linvit.errors import Unreadable
from linvit.files import locked, write_json
from linvit.measurement.record import environment
from linvit.tasks.checks import DIGESTS, RUN, check_same, note_digests
from linvit.tasks.digests import split_digest
from linvit.training import BatchSource, Config, Engine, Outcome, Output, Phase, Processes, Task
from linvit.training.checkpoints import checksum
from linvit.training.drop_path import set_drop_path
from linvit.training.engine.phases import compiles
from linvit.training.optimisation import check_trainable

PATIENCE = 10.0  # seconds to wait for a folder: the workers of a killed run outlive it a little


class Fitting:
    """Base of each task's fitting, which makes the source of batches and the phases and calls `assemble`. The output's
    identity says how the model came about, for the run's record and its checkpoints."""

    phases: list[Phase]
    source: BatchSource
    checks: BatchSource | None  # to evaluate on
    engine: Engine
    identity: dict[str, Any]

    def __init__(self, config: Config, processes: Processes, output: Output | None) -> None:
        self.config, self.processes, self.output = config, processes, output or Output()

    def prepare_model(self, model: nn.Module) -> None:
        """Bring a model into the recipe's form."""
        check_trainable(model, self.config)
        config = self.config
        trunk: Any = getattr(getattr(model, "backbone", None), "trunk", model)
        if not set_drop_path(trunk, config.drop_path, config.drop_path_skip, config.drop_path_rule):
            self.note(f"{type(model).__name__} has no place for drop path: left out" if config.drop_path else "")
        if compiles(config, self.processes.device):
            # The compiler gives up on a function after a few different uses of it and leaves it slow, so what it holds
            # of earlier runs goes first.
            torch._dynamo.reset()

    def assemble(
        self,
        model: nn.Module,
        task: Task,
        splits: Sequence[Any],
        *,
        classes: Sequence[str],
        loaders: list[str],
        teacher: nn.Module | None,
    ) -> None:
        """The engine, once `source` and `phases` are there. The splits and the classes say what the run is, `loaders`
        how it reads."""
        splits = [split for split in splits if split is not None]
        sets = [{"name": split.name, "images": len(split)} for split in splits]
        known = {**self.output.identity, "sets": sets, "classes": list(classes)}
        self.identity = {**known, "loaders": loaders, DIGESTS: [split_digest(split) for split in splits]}
        known["teacher weights"] = None if teacher is None else checksum(teacher.state_dict())
        output = replace(self.output, identity=known)
        self.engine = Engine(self.processes, model, self.config, self.source, self.phases, task=task, output=output)

    def note(self, text: str) -> None:
        if text and self.output.watch is not None:
            self.output.watch({"kind": "note", "step": 0, "text": text})

    def run(self, *, resume: bool = False) -> Outcome:
        """Train to the end, or with `resume` go on to it. Nobody else trains into the folder meanwhile."""
        folder, first = self.output.folder, self.processes.first
        busy = f"another process trains into {folder}: wait for it, or give another folder"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=PATIENCE, busy=busy) if folder is not None and first else nullcontext():
            if folder is not None and resume:
                check_same(folder, self.config, self.identity)
            if folder is not None and first and not self.engine.state.begun:
                record = {"kind": "training", "config": self.config.to_dict(), **self.identity}
                write_json(folder / RUN, {**record, "environment": environment(self.processes.device)})
            elif folder is not None and first:
                note_digests(folder, self.identity[DIGESTS])
            vars(self.engine.model).pop("linvit_source", None)  # from now on the weights are its own
            try:
                return self.engine.run(resume=resume)
            except Unreadable as error:
                if folder is None:
                    raise
                note_digests(folder, None)  # it is told to be another when the file was replaced
                hint = "replace the file rather than delete it: a run goes on with the same images only"
                raise Unreadable(*error.files, hint=hint) from None

    @property
    def shown(self) -> nn.Module:
        """The model that is evaluated: the moving average of the weights where the recipe has one."""
        return self.engine.state.shown

    def close(self) -> None:
        """Take the objectives' hooks off the models, and end the loaders' workers."""
        for phase in self.phases:
            phase.objective.close()
        self.close_sources()

    def close_sources(self) -> None:
        """End the loaders' workers alone, where the phases serve another run."""
        for source in (self.source, self.checks):
            close = getattr(source, "close", None)
            if close is not None:
                close()
