"""Train a classifier: data, recipe and teacher brought together for the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from linvit.errors import LinvitError, unknown
from linvit.measurement.record import environment, write_json
from linvit.tasks.classify.data import Images, Stream, check_outputs
from linvit.tasks.classify.metrics import Evaluation, evaluate
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Held, Progress, Resident, decode, quiet
from linvit.tasks.classify.streaming import Streamed
from linvit.training.config import Config
from linvit.training.contract import BatchSource
from linvit.training.distillation import Teacher
from linvit.training.drop_path import set_drop_path
from linvit.training.engine import FREE, Engine, Outcome
from linvit.training.objectives import LOWERED, make_phases
from linvit.training.phases import Phase, compiles
from linvit.training.processes import make_accelerator
from linvit.training.repeating import repeatable

LOADERS = ("auto", "resident", "streamed")
SMALL = 4 * 2**30  # bytes of decoded pictures up to which a set goes to the device by itself
CHECKED = 2  # so many training batches at once in evaluation, which keeps nothing for a backward pass
RUN = "run.json"
Split = Images | Stream


def fit(
    model: nn.Module, train: Split, validation: Split | None, config: Config, *, resume: bool = False, **options: Any
) -> Outcome:
    """Train the model in place by a config; the options are those of `Fitting`."""
    return Fitting(model, train, validation, config, **options).run(resume=resume)


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
        for split in (train, validation):
            if split is not None:
                check_outputs(split, classes)
        check_labels(config, train, validation)
        self.teacher, self.labelled = teacher, validation is None or validation.labelled
        size = config.input_size or max(config.random_sizes, default=None)
        preprocessing = Preprocessing.of(model, size, config.test_crop)
        make = SourceMaker(accelerator, config, preprocessing, classes, loader, workers, progress, held)
        if phases is None:
            placed = set_drop_path(model, config.drop_path, config.drop_path_skip)
            if not placed and config.drop_path and watch:
                text = f"{type(model).__name__} has no place for drop path: left out"
                watch({"kind": "note", "step": 0, "text": text})
            for side in {*config.random_sizes, *([size] if size else [])}:
                check_size(model, side, len(preprocessing.mean))
            phases = self.make_phases(model, teacher, train.labelled)
        if validation is not None and validation.note and watch:
            watch({"kind": "note", "step": 0, "text": validation.note})
        self.source = make(train, Augmentation.of(config))
        self.checks = make(validation, None) if validation is not None else None
        sets = [{"name": split.name, "images": len(split)} for split in (train, validation) if split is not None]
        self.identity = {**(identity or {}), "sets": sets}
        self.phases = phases
        self.engine = Engine(
            accelerator,
            model.to(accelerator.device),
            config,
            self.source,
            phases,
            folder=folder,
            evaluate=self.metrics if self.checks is not None else None,
            watch=watch,
            identity=self.identity,
            models=models,
        )

    def make_phases(self, model: nn.Module, teacher: nn.Module | None, labelled: bool) -> list[Phase]:
        """New phases mean new steps to compile. The compiler gives up on a function after a few different uses of it
        and leaves it slow, so what it holds of earlier runs goes first."""
        if compiles(self.config, self.accelerator.device):
            torch._dynamo.reset()
        model.to(self.accelerator.device)
        if teacher is not None:
            teacher.to(self.accelerator.device)
        return make_phases(self.config, model, teacher, labelled=labelled)

    def run(self, *, resume: bool = False) -> Outcome:
        """Train to the end, or with `resume` go on to it."""
        if self.folder is not None and resume:
            check_same(self.folder, self.config, self.identity)
        if self.folder is not None and self.accelerator.is_main_process and not self.engine.begun:
            record = {"kind": "training", "config": self.config.to_dict(), **self.identity}
            write_json(self.folder / RUN, {**record, "environment": environment(self.accelerator.device)})
        return self.engine.run(resume=resume)

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
        return None if teacher is None else Teacher(teacher, precision=LOWERED.get(self.config.precision))


def check_labels(config: Config, train: Split, validation: Split | None) -> None:
    """Whether what has no labels needs none."""
    if not train.labelled and config.needs_labels:
        hint = "set distillation_weight=1" if config.distillation != "none" else "choose a recipe with a teacher"
        raise LinvitError(f"{train.name} has no labels to learn from: {hint}, or put images in CLASS folders")
    if validation is not None and train.labelled and not validation.labelled:
        raise LinvitError(f"{validation.name} has no labels to validate by: put images in CLASS folders")


def check_same(folder: Path, config: Config, identity: Mapping[str, Any]) -> None:
    """Say what differs when somebody goes on with a run by another recipe, model or set."""
    try:
        begun = json.loads((folder / RUN).read_text(encoding="utf-8"))
        settings = begun["config"].items()
    except (OSError, ValueError, KeyError, AttributeError):
        return  # the checkpoints know as well, only not what
    ours = config.to_dict()
    was = next((f"{key}={value}" for key, value in settings if key not in FREE and ours.get(key) != value), None)
    if was is None:
        now = json.loads(json.dumps(identity))
        was = next((f"{key} {begun[key]}" for key in now if begun.get(key) != now[key]), None)
    if was is not None:
        raise LinvitError(f"the run in {folder} was begun with {was}: resume it so, or give another folder")


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
        self.accelerator, self.config, self.preprocessing = accelerator, config, preprocessing
        self.classes, self.loader, self.workers, self.progress = classes, loader, workers, progress
        self.held = held

    def __call__(self, split: Split, augmentation: Augmentation | None) -> BatchSource:
        config, where = self.config, self.accelerator
        place: dict[str, Any] = {"seed": config.seed, "rank": where.process_index, "world": where.num_processes}
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


@torch.no_grad()
def check_size(model: nn.Module, side: int, channels: int) -> None:
    """Whether the model takes images of this size; many are built for one."""
    like = next(model.parameters())
    training = model.training
    try:
        model.eval()(torch.zeros(1, channels, side, side, device=like.device, dtype=like.dtype))
    except (AssertionError, RuntimeError, LinvitError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LinvitError(
            f"{type(model).__name__} cannot take images of {side} pixels ({reason}): set input_size=none random_sizes= "
            "for its own size, or build it with --model-arg dynamic_img_size=true"
        ) from None
    finally:
        model.train(training)


def outputs_of(model: Any) -> int:
    """How many classes a model tells apart."""
    found = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    if not isinstance(found, int) or found < 1:
        raise LinvitError(f"{type(model).__name__} has no classifier: create it with num_classes=…")
    return found
