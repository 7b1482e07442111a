"""Train a classifier: data, recipe and teacher brought together for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linvit.conversion.saving import label_names, note
from linvit.errors import LinvitError, Unreadable, unknown
from linvit.files import locked, write_json
from linvit.measurement.record import environment
from linvit.tasks.classify.checks import RUN, check_labels, check_same, check_size, check_teacher_size, outputs_of
from linvit.tasks.classify.classes import match_sets
from linvit.tasks.classify.data import Images, Stream
from linvit.tasks.classify.metrics import Evaluation, evaluate
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Held, Progress, Resident, decode, quiet
from linvit.tasks.classify.streaming import Streamed
from linvit.training.checkpoints import checksum
from linvit.training.config import Config
from linvit.training.contract import BatchSource, Task
from linvit.training.drop_path import set_drop_path
from linvit.training.engine.loop import Engine, Outcome, Output
from linvit.training.engine.phases import Phase, compiles, repeatable
from linvit.training.objectives.stages import make_phases
from linvit.training.objectives.teacher import Teacher
from linvit.training.optimisation import check_trainable
from linvit.training.processes import Processes, make_processes

LOADERS = ("auto", "resident", "streamed")
SMALL = 4 * 2**30  # bytes of decoded pictures up to which a set goes to the device by itself
CHECKED = 2  # so many training batches at once in evaluation, which keeps nothing for a backward pass
PATIENCE = 10.0  # seconds to wait for a folder: the workers of a killed run outlive it a little
Split = Images | Stream


@dataclass(frozen=True)
class Sets:
    """What a run learns from and is validated on, and how images get to the device. `held` are decoded sets that
    several runs in one process share."""

    train: Split
    validation: Split | None = None
    loader: str = "auto"
    workers: int = 0
    progress: Progress = quiet
    held: Held | None = None

    def __post_init__(self) -> None:
        if self.loader not in LOADERS:
            raise unknown("loader", self.loader, LOADERS)
        if self.workers < 0:
            raise LinvitError(f"--workers {self.workers}: give 0 or more")

    @property
    def splits(self) -> list[Split]:
        return [self.train] if self.validation is None else [self.train, self.validation]

    def resident(self, split: Split, size: tuple[int, int]) -> bool:
        """Whether a split is kept on the device."""
        if self.loader != "auto":
            return self.loader == "resident"
        return isinstance(split, Images) and len(split) * 3 * size[0] * size[1] <= SMALL

    def source(
        self,
        split: Split,
        preprocessing: Preprocessing,
        classes: int,
        config: Config,
        processes: Processes,
        augmentation: Augmentation | None = None,
    ) -> BatchSource:
        """The batches of a split, on the device or streamed to it; without augmentation, for evaluation."""
        place: dict[str, Any] = {"seed": config.seed, "rank": processes.rank, "world": processes.world}
        place |= {"repeats": config.repeats, "augmentation": augmentation}
        batch = config.batch_size // (processes.world * config.accumulate)
        if not self.resident(split, preprocessing.size):
            place |= {"device": processes.device, "workers": self.workers}
            return Streamed(split, preprocessing, batch, classes, compile=compiles(config, processes.device), **place)
        training = augmentation is not None
        how: dict[str, Any] = {"progress": self.progress, "held": self.held}
        pixels = decode(split, preprocessing, device=processes.device, training=training, **how)
        batch = batch if training else batch * CHECKED
        return Resident(pixels, preprocessing, batch, classes, compile=compiles(config, processes.device), **place)


class Classification(Task):
    """The best weights have the highest top-1, or where there are no labels agree with the teacher most often."""

    def __init__(
        self, checks: BatchSource | None, labelled: bool, teacher: nn.Module | None, processes: Processes
    ) -> None:
        self.checks, self.labelled, self.teacher, self.precision = checks, labelled, teacher, processes.precision
        if checks is not None:
            self.best = "top1" if labelled else "agreement"

    def evaluate(self, model: nn.Module, teacher: nn.Module | None) -> Evaluation:
        if self.checks is None:
            raise LinvitError("there is no validation set to evaluate on")
        asked = Teacher(teacher, student=model, precision=self.precision) if teacher is not None else None
        return evaluate(model, self.checks, teacher=asked, labelled=self.labelled)

    def metrics(self, model: nn.Module) -> Mapping[str, float]:
        return self.evaluate(model, None if self.labelled else self.teacher).metrics()


class Fitting:
    """A model, data and a recipe brought together. The output's identity says how the model came about, for the run's
    record and its checkpoints. Runs in one process can share `phases`, made for this very model by a config that
    differs in its seed only, with the steps they have compiled."""

    def __init__(
        self,
        model: nn.Module,
        sets: Sets,
        config: Config,
        *,
        teacher: nn.Module | None = None,
        processes: Processes | None = None,
        output: Output | None = None,
        phases: list[Phase] | None = None,
    ) -> None:
        self.processes = processes = processes or make_processes(config)
        self.config, self.output = config, output or Output()
        classes = outputs_of(model)
        train, validation = match_sets(sets.train, sets.validation, model, classes)
        sets = replace(sets, train=train, validation=validation)
        check_labels(config, train, validation)
        size = config.size or max(config.random_sizes, default=None)
        preprocessing = Preprocessing.of(model, size, config.test_crop)
        model.to(processes.device)
        if phases is None:
            self.prepare(model, teacher, preprocessing)
            phases = make_phases(config, model, teacher, labelled=train.labelled)
        self.phases = phases
        if config.repeats > 1 and isinstance(train, Stream):
            self.note(f"{train.name} can only be read in order: no image comes {config.repeats} times in a step")
        if validation is not None:
            self.note(validation.note)
        place = (preprocessing, classes, config, processes)
        self.source = sets.source(train, *place, Augmentation.of(config))
        if isinstance(self.source, Streamed):
            self.note(self.source.note)
        self.checks = sets.source(validation, *place) if validation is not None else None
        labelled = validation is None or validation.labelled
        self.task = Classification(self.checks, labelled, teacher, processes)
        known = {**self.output.identity, "sets": [{"name": each.name, "images": len(each)} for each in sets.splits]}
        known["classes"] = list(label_names(model))
        resident = [sets.resident(split, preprocessing.size) for split in sets.splits]
        self.identity = {**known, "loaders": ["resident" if each else "streamed" for each in resident]}
        if self.output.models:
            note(model, crop_pct=preprocessing.crop, input_size=(len(preprocessing.mean), *preprocessing.size))
            note(model, held_out_of=validation.held_out_of if validation is not None else 0)
        known["teacher weights"] = None if teacher is None else checksum(teacher.state_dict())
        output = replace(self.output, identity=known)
        self.engine = Engine(processes, model, config, self.source, phases, task=self.task, output=output)

    def prepare(self, model: nn.Module, teacher: nn.Module | None, preprocessing: Preprocessing) -> None:
        """Bring the model into the recipe's form, and see that it, the teacher and the recipe go together."""
        config, device = self.config, self.processes.device
        check_trainable(model, config)
        if not set_drop_path(model, config.drop_path, config.drop_path_skip, config.drop_path_rule):
            self.note(f"{type(model).__name__} has no place for drop path: left out" if config.drop_path else "")
        channels, sides = len(preprocessing.mean), {(side, side) for side in config.random_sizes}
        for shape in sides | ({preprocessing.size} if config.size or sides else set()):
            check_size(model, shape, channels)
        if teacher is not None:
            teacher.to(device)
            for shape in {preprocessing.size, *sides}:
                check_teacher_size(teacher, shape, channels)
        if compiles(config, device):
            # The compiler gives up on a function after a few different uses of it and leaves it slow, so what it holds
            # of earlier runs goes first.
            torch._dynamo.reset()

    def note(self, text: str) -> None:
        if text and self.output.watch is not None:
            self.output.watch({"kind": "note", "step": 0, "text": text})

    def run(self, *, resume: bool = False) -> Outcome:
        """Train to the end, or with `resume` go on to it. Nobody else trains into the folder meanwhile."""
        folder = self.output.folder
        if folder is None or not self.processes.first:
            return self.run_alone(folder, resume)
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"another process trains into {folder}: wait for it, or give another folder"
        with locked(folder, wait=PATIENCE, busy=busy):
            return self.run_alone(folder, resume)

    def run_alone(self, folder: Path | None, resume: bool) -> Outcome:
        if folder is not None and resume:
            check_same(folder, self.config, self.identity)
        if folder is not None and self.processes.first and not self.engine.state.begun:
            record = {"kind": "training", "config": self.config.to_dict(), **self.identity}
            write_json(folder / RUN, {**record, "environment": environment(self.processes.device)})
        vars(self.engine.model).pop("linvit_source", None)  # from now on the weights are its own
        try:
            return self.engine.run(resume=resume)
        except Unreadable as error:
            if folder is None:
                raise
            reason = "a run goes on with the same images only"
            raise Unreadable(f"{error}; replace the file rather than delete it: {reason}") from None

    @property
    def shown(self) -> nn.Module:
        """The model that is evaluated: the moving average of the weights where the recipe has one."""
        return self.engine.state.shown

    def evaluate(self, teacher: nn.Module | None = None) -> Evaluation:
        """What the trained weights get right on the validation set, in the recipe's precision."""
        with repeatable(self.config.deterministic), torch.no_grad(), self.processes.autocast():
            return self.task.evaluate(self.shown, teacher)

    def close(self) -> None:
        """Take the objectives' hooks off the models."""
        for phase in self.phases:
            phase.objective.close()
