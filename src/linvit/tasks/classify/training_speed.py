"""Images a second of a whole training: loader, augmentation, step and optimiser, as `linvit train` runs them.

Each model is first held against its own plain reference on a few images, and its loss has to be a number to the end: no
speed of something broken. Speeds are taken over windows of steps after the first, in which things are compiled; how
long that takes is noted as well. A recipe's stages are timed one after the other, the longest for as many steps as
asked and the others for a few, and what is solved before them as well: together that is how long the recipe takes.

A set of ImageNet's size has to be streamed, so of a loader that counts which leaves most of the resident one's speed;
beside them stands the step alone, one batch again and again. The JPEGs made for this are noise with a photograph's
spectrum, which gives files of a photograph's size. The pictures of both decoders have to agree before they are timed.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from linvit.clock import Timing, synchronise
from linvit.errors import LinvitError
from linvit.measurement.model_speed import TOLERANCES, exact_logits
from linvit.measurement.speed import relative_rms
from linvit.tasks.classify.decoding import decodes_jpegs
from linvit.tasks.classify.fitting import ClassifierFitting, Sets
from linvit.tasks.classify.streaming import Streamed
from linvit.training.config import Config
from linvit.training.contract import Batch, BatchSource
from linvit.training.engine.loop import Output
from linvit.training.processes import make_processes

WINDOW = 25  # steps between two looks at the clock
STEP_ALONE = "none: the step alone"
LOADERS: dict[str, dict[str, Any]] = {
    STEP_ALONE: {"loader": "resident"},
    "resident": {"loader": "resident"},
    "streamed, decoded on the GPU": {"loader": "streamed", "decoder": "gpu"},
    "streamed, decoded on the CPU": {"loader": "streamed", "decoder": "cpu"},
}
APART = 6.0  # grey levels by which decoders may differ on the mean


def loaders_for(sets: Sets, device: torch.device) -> dict[str, Sets]:
    """The training set by each loader that there is on the device."""
    usable = {name: how for name, how in LOADERS.items() if how.get("decoder") != "gpu" or decodes_jpegs(device)}
    return {name: replace(sets, **how) for name, how in usable.items()}


def training_speed(
    model: nn.Module,
    sets: Sets,
    config: Config,
    *,
    steps: int = 200,
    teacher: nn.Module | None = None,
    device: str = "auto",
    loading: bool = True,
) -> dict[str, Any]:
    """A row of the result: the error of the logits, images per second over the windows of the longest stage, peak
    memory of the device, and the seconds of the whole recipe. Without `loading` all steps have the first one's
    batch."""
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
        with closing(timed.fitting):
            if not parts:
                row |= timed.check(sets.decoder)
                if not row["error"] <= TOLERANCES[config.precision]:
                    return {"status": "wrong", "error": min(row["error"], 1e30)}
            found = timed.run(loading)
        seconds = found["prepare_seconds"] + stage.epochs * len(train) / found["images_per_second"]
        parts.append({"name": stage.name, "epochs": stage.epochs, "seconds": seconds, **found})
        row |= found if stage is longest else {}
    row["peak_bytes"] = max(part["peak_bytes"] for part in parts) if parts[0]["peak_bytes"] is not None else None
    del row["prepare_seconds"]
    return {"status": "ok", **row, "stages": parts, "seconds": sum(part["seconds"] for part in parts)}


class TimedStage:
    """One stage of a training, watched."""

    def __init__(self, model: nn.Module, sets: Sets, settings: Config, **options: Any) -> None:
        self.model, self.windows, self.arrived, self.prepared = model, list[dict[str, Any]](), 0.0, 0.0
        self.fitting = ClassifierFitting(
            model, sets, settings, output=Output(watch=self.watch, models=False), **options
        )
        self.source, self.device = self.fitting.source, self.fitting.processes.device
        for phase in self.fitting.phases:
            if phase.prepare is not None:
                phase.prepare = partial(self.prepare, phase.prepare)

    def watch(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            self.arrived = self.arrived or time.perf_counter()
            self.windows.append(record)

    def prepare(self, call: Callable[..., object], batches: Iterator[Batch]) -> None:
        """What comes before the first step, done twice: the first time, libraries are loaded."""
        call(batches)
        if isinstance(batches, Generator):
            batches.close()  # a loader's workers serve one epoch at a time
        synchronise(self.device)
        begin = time.perf_counter()
        call(self.fitting.engine.source.epoch(0))
        synchronise(self.device)
        self.prepared = time.perf_counter() - begin

    def check(self, decoder: str) -> dict[str, float]:
        """The error of the logits in the recipe's precision, and how far the GPU's decoder is from the CPU's."""
        found = {}
        if decoder == "gpu" and isinstance(self.source, Streamed):
            found["grey_levels_from_cpu"] = apart = grey_levels(self.source)
            if not apart <= APART:
                raise LinvitError(f"the two decoders differ by {apart:.1f} grey levels")
        images = next(iter(self.source.epoch(0)))[0][:4]
        with torch.no_grad(), self.fitting.processes.autocast():
            ours = self.model.eval()(images)
        found["error"] = relative_rms(ours.float(), exact_logits(self.model, images))
        self.model.train()
        return found

    def run(self, loading: bool) -> dict[str, Any]:
        if not loading:
            self.fitting.engine.source = OneBatch(self.source)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        self.fitting.run()
        speeds = Timing.of([window["images_per_second"] for window in self.windows[1:]])
        return {
            "images_per_second": speeds.median,
            "windows": asdict(speeds),
            "first_window_seconds": self.arrived - begin,
            "prepare_seconds": self.prepared,
            "loss": {"first": self.windows[0]["loss"], "last": self.windows[-1]["loss"]},
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        }


class OneBatch:
    """A loader's first batch again and again."""

    def __init__(self, source: BatchSource) -> None:
        self.batches, self.images, self.first = source.batches, source.images, next(iter(source.epoch(0)))

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[Batch]:
        return repeat(self.first, self.batches - skip)


def grey_levels(source: Streamed) -> float:
    """How far the first pictures are from those that the CPU decodes, on the mean."""
    order = source.order
    options: dict[str, Any] = {"augmentation": source.augmentation, "seed": order.seed, "repeats": order.repeats}
    options |= {"device": source.device, "workers": source.workers, "decoder": "cpu"}
    other = Streamed(source.set, source.preprocessing, order.batch, source.classes, **options)
    ours, theirs = (next(one.pictures(0, 0))[0].float() for one in (source, other))
    other.close()
    return float((ours - theirs).abs().mean())


def make_jpegs(folder: Path, images: int = 4096, *, copies: int = 4, size: tuple[int, int] = (500, 375)) -> None:
    """Pictures in class folders, each under several names: an epoch is long enough to show a loader at work."""
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(make_jpeg, folder, copies, size), range(images), chunksize=-(-images // 64)))


def make_jpeg(folder: Path, copies: int, size: tuple[int, int], index: int) -> None:
    """Noise in octaves, each weaker than the one before, in a file of 40 to 110 kB."""
    draw = np.random.default_rng(index)
    picture = np.zeros((size[1], size[0], 3))
    for octave in range(2, 9):
        coarse = draw.integers(0, 256, (2**octave * 3 // 4, 2**octave, 3), dtype=np.uint8)
        layer = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        picture += (np.asarray(layer) - 127.5) * 0.7 ** (octave - 2)
    path = folder / f"class{index % 10}" / f"{index}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((picture + 127.5).clip(0, 255).astype(np.uint8)).save(path, quality=88)
    for copy in range(1, copies):
        os.link(path, path.with_stem(f"{index}-{copy}"))
