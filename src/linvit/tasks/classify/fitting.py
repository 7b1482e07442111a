"""Train a classifier: data, recipe and teacher brought together for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from linvit.conversion.saving import label_names, note
from linvit.errors import LinvitError, Unreadable, unknown
from linvit.files import write_json
from linvit.measurement.record import environment
from linvit.tasks.classify.checks import RUN, check_labels, check_same, check_size, check_teacher_size, outputs_of
from linvit.tasks.classify.classes import match_sets
from linvit.tasks.classify.data import Images, Stream
from linvit.tasks.classify.metrics import Evaluation, evaluate
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Held, Progress, Resident, decode, quiet
from linvit.tasks.classify.streaming import Streamed
from linvit.training.alone import alone_in
from linvit.training.checkpoints import checksum
from linvit.training.config import Config
from linvit.training.contract import BatchSource
from linvit.training.distillation import Teacher
from linvit.training.drop_path import set_drop_path
from linvit.training.engine import Engine, Outcome
from linvit.training.objectives import LOWERED, make_phases
from linvit.training.phases import Phase, check_muon, check_trainable, compiles
from linvit.training.processes import make_accelerator
from linvit.training.repeating import repeatable

LOADERS = ("auto", "resident", "streamed")
SMALL = 4 * 2**30  # bytes of decoded pictures up to which a set goes to the device by itself
CHECKED = 2  # so many training batches at once in evaluation, which keeps nothing for a backward pass
Split = Images | Stream


def fit(
    model: nn.Module, train: Split, validation: Split | None, config: Config, *, resume: bool = False, **options: Any
) -> Outcome:
    """Train the model in place by a config; the options are those of `Fitting`.

    The stages' `trainable` says what learns, whatever was frozen before. With `ema` the averaged weights are those that
    are evaluated and saved, `Fitting.shown`; the model keeps its own."""
    made = Fitting(model, train, validation, config, **options)
    try:
        return made.run(resume=resume)
    finally:
        if "phases" not in options:
            for phase in made.phases:
                getattr(phase.objective, "close", lambda: None)()


class Fitting:
    """A model, data and a recipe brought together. `identity` says how the model came about, for the run's record and
    its checkpoints. What several runs in one process can share: `phases`, made for this very model by a config that
    differs in its seed only, with the steps they have compiled, and `held`, the decoded sets."""

    def __init__(
        self,
        model: nn.Module,
        train: Split,
        validation: Split | None,
        config: Config,
        *,
        teacher: nn.Module | None = None,
        folder: Path | None = None,
        accelerator: Accelerator | None = None,
        loader: str = "auto",
        workers: int = 0,
        watch: Callable[[dict[str, Any]], None] | None = None,
        identity: Mapping[str, Any] | None = None,
        progress: Progress = quiet,
        phases: list[Phase] | None = None,
        held: Held | None = None,
        models: bool = True,
    ) -> None:
        self.accelerator = accelerator = accelerator or make_accelerator(config)
        self.config, self.folder = config, folder
        classes = outputs_of(model)
        train, validation = match_sets(train, validation, model, classes)
        splits = [split for split in (train, validation) if split is not None]
        check_labels(config, train, validation)
        self.teacher, self.labelled = teacher, validation is None or validation.labelled
        size = config.input_size or max(config.random_sizes, default=None)
        preprocessing = Preprocessing.of(model, size, config.test_crop)
        make = SourceMaker(accelerator, config, preprocessing, classes, loader, workers, progress, held)
        if phases is None:
            check_trainable(model, config.plan_of_stages())
            check_muon(model, config)
            placed = set_drop_path(model, config.drop_path, config.drop_path_skip, config.drop_path_rule)
            if not placed and config.drop_path and watch:
                text = f"{type(model).__name__} has no place for drop path: left out"
                watch({"kind": "note", "step": 0, "text": text})
            for side in {*config.random_sizes, *([size] if size else [])}:
                check_size(model, side, len(preprocessing.mean))
            if teacher is not None:
                teacher.to(accelerator.device)
                for shape in {preprocessing.size, *((side, side) for side in config.random_sizes)}:
                    check_teacher_size(teacher, shape, len(preprocessing.mean))
            phases = self.make_phases(model, teacher, train.labelled)
        if config.repeats > 1 and isinstance(train, Stream) and watch:
            text = f"{train.name} can only be read in order: no image comes {config.repeats} times in a step"
            watch({"kind": "note", "step": 0, "text": text})
        if validation is not None and validation.note and watch:
            watch({"kind": "note", "step": 0, "text": validation.note})
        self.source = make(train, Augmentation.of(config))
        if isinstance(self.source, Streamed) and self.source.note and watch:
            watch({"kind": "note", "step": 0, "text": self.source.note})
        self.checks = make(validation, None) if validation is not None else None
        known = {**(identity or {}), "sets": [{"name": split.name, "images": len(split)} for split in splits]}
        known["classes"] = list(label_names(model))
        loaders = ["resident" if make.resident(split) else "streamed" for split in splits]
        self.identity = {**known, "loaders": loaders}
        self.phases = phases
        if models:
            held_out = validation.held_out_of if validation is not None else 0
            note(model, crop_pct=preprocessing.crop, input_size=(len(preprocessing.mean), *preprocessing.size))
            note(model, held_out_of=held_out)
        self.engine = Engine(
            accelerator,
            model.to(accelerator.device),
            config,
            self.source,
            phases,
            folder=folder,
            evaluate=self.metrics if self.checks is not None else None,
            watch=watch,
            identity={**known, "teacher weights": None if teacher is None else checksum(teacher.state_dict())},
            models=models,
        )

    def make_phases(self, model: nn.Module, teacher: nn.Module | None, labelled: bool) -> list[Phase]:
        """New phases mean new steps to compile. The compiler gives up on a function after a few different uses of it
        and leaves it slow, so what it holds of earlier runs goes first."""
        if compiles(self.config, self.accelerator.device):
            torch._dynamo.reset()
        model.to(self.accelerator.device)
        return make_phases(self.config, model, teacher, labelled=labelled)

    def run(self, *, resume: bool = False) -> Outcome:
        """Train to the end, or with `resume` go on to it."""
        with alone_in(self.folder if self.accelerator.is_main_process else None):
            return self.run_alone(resume)

    def run_alone(self, resume: bool) -> Outcome:
        if self.folder is not None and resume:
            check_same(self.folder, self.config, self.identity)
        if self.folder is not None and self.accelerator.is_main_process and not self.engine.begun:
            record = {"kind": "training", "config": self.config.to_dict(), **self.identity}
            write_json(self.folder / RUN, {**record, "environment": environment(self.accelerator.device)})
        try:
            return self.engine.run(resume=resume)
        except Unreadable as error:
            if self.folder is None:
                raise
            reason = "a run goes on with the same images only"
            raise Unreadable(f"{error}; replace the file rather than delete it: {reason}") from None

    @property
    def shown(self) -> nn.Module:
        """The model that is evaluated: the moving average of the weights where the recipe has one."""
        return self.engine.keeper.shown

    def evaluate(self, teacher: nn.Module | None = None) -> Evaluation:
        """What the trained weights get right on the validation set, in the recipe's precision."""
        if self.checks is None:
            raise LinvitError("there is no validation set to evaluate on")
        with repeatable(self.config.deterministic), torch.no_grad(), self.accelerator.autocast():
            return evaluate(self.shown, self.checks, teacher=self.asked(teacher), labelled=self.labelled)

    def metrics(self, shown: nn.Module) -> dict[str, float]:
        assert self.checks is not None
        teacher = None if self.labelled else self.asked(self.teacher)
        return evaluate(shown, self.checks, teacher=teacher, labelled=self.labelled).metrics()

    def asked(self, teacher: nn.Module | None) -> Teacher | None:
        if teacher is None:
            return None
        return Teacher(teacher, student=self.shown, precision=LOWERED.get(self.config.precision))


class SourceMaker:
    """Makes the batches of a split, on the device or streamed to it."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        preprocessing: Preprocessing,
        classes: int,
        loader: str,
        workers: int,
        progress: Progress = quiet,
        held: Held | None = None,
    ) -> None:
        if loader not in LOADERS:
            raise unknown("loader", loader, LOADERS)
        if workers < 0:
            raise LinvitError(f"--workers {workers}: give 0 or more")
        self.accelerator, self.config, self.preprocessing = accelerator, config, preprocessing
        self.classes, self.loader, self.workers, self.progress = classes, loader, workers, progress
        self.held = held

    def __call__(self, split: Split, augmentation: Augmentation | None) -> BatchSource:
        config, where = self.config, self.accelerator
        place: dict[str, Any] = {"seed": config.seed, "rank": where.process_index, "world": where.num_processes}
        place["repeats"] = config.repeats
        batch = config.batch_size // (where.num_processes * config.accumulate)
        if not self.resident(split):
            return Streamed(
                split,
                self.preprocessing,
                batch,
                self.classes,
                augmentation=augmentation,
                device=where.device,
                workers=self.workers,
                compile=compiles(config, where.device),
                **place,
            )
        training = augmentation is not None
        pixels = decode(
            split, self.preprocessing, device=where.device, training=training, progress=self.progress, held=self.held
        )
        if not training:
            batch *= CHECKED
        compiled = compiles(config, where.device)
        return Resident(
            pixels, self.preprocessing, batch, self.classes, augmentation=augmentation, compile=compiled, **place
        )

    def resident(self, split: Split) -> bool:
        """Whether this split is kept on the device."""
        if self.loader != "auto":
            return self.loader == "resident"
        height, width = self.preprocessing.size
        return isinstance(split, Images) and len(split) * 3 * height * width <= SMALL
