"""Images a second of a whole training: loader, augmentation, step and optimiser, as `linvit train` runs them.

Each model is first held against its own plain reference on a few images, and its loss has to be a number to the end: no
speed of something broken. Speeds are taken over windows of steps after the first, in which things are compiled; how
long that takes is noted as well. Of a recipe in stages the longest is timed, without the least squares before it.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from linvit.attention import Mechanism
from linvit.errors import LinvitError
from linvit.measurement.clock import Timing
from linvit.measurement.model_speed import TOLERANCES
from linvit.measurement.speed import relative_rms
from linvit.tasks.classify.fitting import Fitting, Split
from linvit.tasks.classify.resident import Held
from linvit.training.config import Config

WINDOW = 25  # steps between two looks at the clock


def training_speed(
    model: nn.Module,
    train: Split,
    config: Config,
    *,
    steps: int = 200,
    teacher: nn.Module | None = None,
    held: Held | None = None,
    loader: str = "auto",
    workers: int = 0,
) -> dict[str, Any]:
    """A row of the result: the error of the logits, images per second over the windows, peak memory of the device."""
    windows: list[float] = []
    arrivals: list[float] = []
    losses: list[float] = []

    def watch(record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            arrivals.append(time.perf_counter())
            windows.append(record["images_per_second"])
            losses.append(record["loss"])

    if steps < 3 * WINDOW:
        raise LinvitError(f"{steps} steps are too few for a speed: give at least {3 * WINDOW}")
    settings = replace(config, log_steps=WINDOW, eval_epochs=1e6, cooldown_epochs=0, bn_images=0)
    batches = len(train) // config.batch_size
    if batches < 1:
        raise LinvitError(f"{train.name} has {len(train)} images, fewer than one batch of {config.batch_size}")
    epochs = steps / batches
    settings = replace(settings, epochs=epochs, warmup_epochs=min(config.warmup_epochs, 0.1 * epochs))
    if config.stages:
        longest = max(config.stages, key=lambda stage: stage.epochs)
        settings = replace(settings, stages=(replace(longest, epochs=epochs, fit=0),))
    options: dict[str, Any] = {"teacher": teacher, "held": held, "loader": loader, "workers": workers}
    fitting = Fitting(model, train, None, settings, watch=watch, models=False, **options)
    device = fitting.accelerator.device
    images, _ = next(iter(fitting.source.epoch(0)))
    error = error_of(model, images[:4], fitting)
    if not error <= TOLERANCES[config.precision]:
        return {"status": "wrong", "error": min(error, 1e30)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    fitting.run()
    speeds = Timing.of(windows[1:])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "status": "ok",
        "error": error,
        "images_per_second": speeds.median,
        "windows": asdict(speeds),
        "first_window_seconds": arrivals[0] - begin,
        "loss": {"first": losses[0], "last": losses[-1]},
        "peak_bytes": peak,
    }


def error_of(model: nn.Module, images: torch.Tensor, fitting: Fitting) -> float:
    """Of the logits in the recipe's precision, against float64 with every mechanism on its reference."""
    twin = copy.deepcopy(model).double().eval()
    for module in twin.modules():
        if isinstance(module, Mechanism):
            module.impl = "reference"
    with torch.no_grad():
        exact = twin(images.double())
        with fitting.accelerator.autocast():
            ours = model.eval()(images)
    model.train()
    return relative_rms(ours.float(), exact)
