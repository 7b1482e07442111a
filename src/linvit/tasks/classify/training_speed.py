"""Images a second of a whole training: loader, augmentation, step and optimiser, as `linvit train` runs them.

Each model is first held against its own plain reference on a few images, and its loss has to be a number to the end: no
speed of something broken. Speeds are taken over windows of steps after the first, in which things are compiled; how
long that takes is noted as well. A recipe's stages are timed one after the other, the longest for as many steps as
asked and the others for a few, and what is solved before them as well: together that is how long the recipe takes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from linvit.attention import Mechanism
from linvit.errors import LinvitError
from linvit.measurement.clock import Timing
from linvit.measurement.model_speed import TOLERANCES
from linvit.measurement.speed import relative_rms
from linvit.tasks.classify.fitting import Fitting, Sets
from linvit.training.config import Config
from linvit.training.engine.loop import Output
from linvit.training.processes import make_processes

WINDOW = 25  # steps between two looks at the clock


def training_speed(
    model: nn.Module,
    sets: Sets,
    config: Config,
    *,
    steps: int = 200,
    teacher: nn.Module | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """A row of the result: the error of the logits, images per second over the windows of the longest stage, peak
    memory of the device, and the seconds of the whole recipe."""
    if steps < 3 * WINDOW:
        raise LinvitError(f"{steps} steps are too few for a speed: give at least {3 * WINDOW}")
    train, batches = sets.train, len(sets.train) // config.batch_size
    if batches < 1:
        raise LinvitError(f"{train.name} has {len(train)} images, fewer than one batch of {config.batch_size}")
    stages = config.plan_of_stages()
    longest = max(stages, key=lambda stage: stage.epochs)
    row: dict[str, Any] = {}
    parts: list[dict[str, Any]] = []
    for stage in stages:
        epochs = (steps if stage is longest else 3 * WINDOW) / batches
        settings = replace(config, log_steps=WINDOW, eval_epochs=1e6, cooldown_epochs=0, bn_images=0, epochs=epochs)
        settings = replace(settings, warmup_epochs=min(config.warmup_epochs, 0.1 * epochs))
        if config.stages:
            settings = replace(settings, stages=(replace(stage, epochs=epochs),))
        timed = TimedStage(model, sets, settings, teacher=teacher, processes=make_processes(settings, device))
        if not parts:
            row["error"] = error = timed.error()
            if not error <= TOLERANCES[config.precision]:
                return {"status": "wrong", "error": min(error, 1e30)}
        found = timed.run()
        seconds = found["prepare_seconds"] + stage.epochs * len(train) / found["images_per_second"]
        parts.append({"name": stage.name, "epochs": stage.epochs, "seconds": seconds, **found})
        row |= found if stage is longest else {}
    row["peak_bytes"] = max(part["peak_bytes"] for part in parts) if parts[0]["peak_bytes"] is not None else None
    del row["prepare_seconds"]
    return {"status": "ok", **row, "stages": parts, "seconds": sum(part["seconds"] for part in parts)}


class TimedStage:
    """One stage of a training, watched."""

    def __init__(self, model: nn.Module, sets: Sets, settings: Config, **options: Any) -> None:
        self.windows: list[float] = []
        self.losses: list[float] = []
        self.arrived, self.prepared = 0.0, 0.0
        self.model = model
        self.fitting = Fitting(model, sets, settings, output=Output(watch=self.watch, models=False), **options)
        self.device = self.fitting.processes.device
        for phase in self.fitting.phases:
            if phase.prepare is not None:
                phase.prepare = partial(self.prepare, phase.prepare)

    def watch(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            self.arrived = self.arrived or time.perf_counter()
            self.windows.append(record["images_per_second"])
            self.losses.append(record["loss"])

    def prepare(self, call: Callable[..., object], batches: Iterator[Any]) -> None:
        """What comes before the first step, done twice: the first time, libraries are loaded. Only as many batches are
        fetched as it wants."""
        fetched: list[Any] = []
        spent = 0.0

        def fetch() -> Iterator[Any]:
            nonlocal spent
            begin = now(self.device)
            for batch in batches:
                spent += now(self.device) - begin
                fetched.append(batch)
                yield batch
                begin = now(self.device)

        call(fetch())
        begin = now(self.device)
        call(iter(fetched))
        self.prepared = now(self.device) - begin + spent

    def error(self) -> float:
        images, _ = next(iter(self.fitting.source.epoch(0)))
        return error_of(self.model, images[:4], self.fitting)

    def run(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        self.fitting.run()
        speeds = Timing.of(self.windows[1:])
        return {
            "images_per_second": speeds.median,
            "windows": asdict(speeds),
            "first_window_seconds": self.arrived - begin,
            "prepare_seconds": self.prepared,
            "loss": {"first": self.losses[0], "last": self.losses[-1]},
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        }


def now(device: torch.device) -> float:
    """The time, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def error_of(model: nn.Module, images: torch.Tensor, fitting: Fitting) -> float:
    """Of the logits in the recipe's precision, against float64 with every mechanism on its reference."""
    twin = copy.deepcopy(model).double().eval()
    for module in twin.modules():
        if isinstance(module, Mechanism):
            module.impl = "reference"
    with torch.no_grad():
        exact = twin(images.double())
        with fitting.processes.autocast():
            ours = model.eval()(images)
    model.train()
    return relative_rms(ours.float(), exact)
