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
from linvit.tasks.classify.metrics import evaluate
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Progress, Resident, decode, quiet
from linvit.tasks.classify.streaming import Streamed
from linvit.training.config import Config
from linvit.training.contract import BatchSource
from linvit.training.drop_path import set_drop_path
from linvit.training.engine import FREE, Engine, Outcome
from linvit.training.objectives import make_phases
from linvit.training.processes import make_accelerator

LOADERS = ("auto", "resident", "streamed")
SMALL = 4 * 2**30  # bytes of decoded pictures up to which a set goes to the device by itself
RUN = "run.json"
Split = Images | Stream


def fit(
    model: nn.Module,
    train: Split,
    validation: Split | None,
    config: Config,
    *,
    teacher: nn.Module | None = None,
    folder: Path | None = None,
    resume: bool = False,
    accelerator: Accelerator | None = None,
    loader: str = "auto",
    workers: int = 0,
    watch: Callable[[dict[str, Any]], None] | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Progress = quiet,
) -> Outcome:
    """Train the model in place by a config. `identity` says how the model came about, for the run's record and its
    checkpoints."""
    accelerator = accelerator or make_accelerator(config)
    classes = outputs_of(model)
    for split in (train, validation):
        if split is not None:
            check_outputs(split, classes)
    if not set_drop_path(model, config.drop_path, config.drop_path_skip) and config.drop_path and watch:
        watch({"kind": "note", "step": 0, "text": f"{type(model).__name__} has no place for drop path: left out"})
    size = config.input_size or max(config.random_sizes, default=None)
    preprocessing = Preprocessing.of(model, size, config.test_crop)
    for side in {*config.random_sizes, *([size] if size else [])}:
        check_size(model, side, len(preprocessing.mean))
    make = SourceMaker(accelerator, config, preprocessing, classes, loader, workers, progress)
    source = make(train, Augmentation.of(config))
    measure: Callable[[nn.Module], Mapping[str, float]] | None = None
    if validation is not None:
        checks = make(validation, None)
        measure = lambda shown: evaluate(shown, checks).metrics()  # noqa: E731
    if teacher is not None:
        teacher.to(accelerator.device)
    sets = [{"name": split.name, "images": len(split)} for split in (train, validation) if split is not None]
    identity = {**(identity or {}), "sets": sets}
    engine = Engine(
        accelerator,
        model.to(accelerator.device),
        config,
        source,
        make_phases(config, model, teacher),
        folder=folder,
        evaluate=measure,
        watch=watch,
        identity=identity,
    )
    if folder is not None and resume:
        check_same(folder, config, identity)
    if folder is not None and accelerator.is_main_process and not engine.begun:
        record = {"kind": "training", "config": config.to_dict(), **identity}
        write_json(folder / RUN, {**record, "environment": environment(accelerator.device)})
    return engine.run(resume=resume)


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
    ) -> None:
        if loader not in LOADERS:
            raise unknown("loader", loader, LOADERS)
        self.accelerator, self.config, self.preprocessing = accelerator, config, preprocessing
        self.classes, self.loader, self.workers, self.progress = classes, loader, workers, progress

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
        pixels = decode(split, self.preprocessing, device=where.device, training=training, progress=self.progress)
        compiled = config.compile not in ("off", "auto") or (config.compile == "auto" and where.device.type == "cuda")
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
