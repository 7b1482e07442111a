"""One task carried out, from its identity to its result.

The result depends on the identity alone: not on the place, on what ran before in this process, or on whether the run
was killed in between. Only timings and memory differ.
"""

from __future__ import annotations

import base64
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from linvit.comparison.description.task import Task
from linvit.comparison.results import (
    Accuracy,
    Conversion,
    DataFacts,
    Environment,
    EpochAccuracy,
    ModelFacts,
    Run,
    Speed,
    SpeedIdentity,
    Training,
)
from linvit.comparison.scheduling.execution.drift import measure_drift
from linvit.comparison.scheduling.execution.measuring import measure_speed, tokens_of
from linvit.comparison.scheduling.execution.sharing import Bench, Shared, identity_of
from linvit.comparison.scheduling.store import Store, head_of
from linvit.conversion import save
from linvit.errors import LinvitError
from linvit.measurement.macs import count_macs, count_parameters
from linvit.measurement.record import environment, package
from linvit.tasks.classify.checks import check_same
from linvit.tasks.classify.fitting import Fitting, Sets
from linvit.tasks.classify.metrics import Evaluation
from linvit.training.config import Config
from linvit.training.engine.loop import Output
from linvit.training.engine.phases import repeatable
from linvit.training.logs import read_log
from linvit.training.processes import Processes, make_processes

THREADS = 4  # at most, of a training on the CPU
SMALL = 2e9  # MACs of a step below which it has one
PACKAGES = ("torch", "torchvision", "timm", "safetensors", "numpy", "scipy", "scikit-learn", "triton")
SHARED = Shared()
Watch = Callable[[dict[str, Any]], None]


def execute(
    task: Task, store: Store, *, device: str = "auto", shared: int = 1, watch: Watch | None = None
) -> Run | Speed:
    """Do a task and give its result. A training that was killed goes on from the store's work folder. `shared` is how
    many runs have the device now; `watch` hears the training's log."""
    began = time.perf_counter()
    if not isinstance(task.identity, SpeedIdentity):
        found = train(task, store, device, shared, watch)
        return replace(found, seconds=round(time.perf_counter() - began, 3))
    SHARED.clear()  # the device is for what is timed
    where, rows = measure_speed(task.identity, watch=watch)
    seconds = round(time.perf_counter() - began, 3)
    return Speed(**head_of(task, "speed"), environment=where, rows=rows, seconds=seconds)


def train(task: Task, store: Store, device: str, shared: int, watch: Watch | None) -> Run:
    """A run or a teacher."""
    config = Config.from_dict(identity_of(task).config)
    processes = make_processes(config, device)
    memory = Memory(processes.device, watch)
    try:
        with fixed_threads(processes.device, threads()):
            bench = SHARED.prepare(task, store, config, processes.device)
            bench.facts = bench.facts or facts(bench.model, task.identity.size)
        with fixed_threads(processes.device, threads(bench.facts.macs * config.batch_size)):
            found = train_on(bench, task, store, config, processes, memory)
    except BaseException:
        SHARED.forget()
        raise
    if config.mesa:  # its stages belong to the moving average of this run
        SHARED.forget()
    return replace(found, training=replace(found.training, peak_bytes=memory.peak, shared=shared))


def train_on(bench: Bench, task: Task, store: Store, config: Config, processes: Processes, memory: Memory) -> Run:
    sets = SHARED.data(task)
    work = store.work_folder(task.key)
    fitting = Fitting(
        bench.model,
        Sets(*sets, held=SHARED.held),
        config,
        teacher=bench.guide,
        processes=processes,
        output=Output(work, memory.hear, {"task": task.key}, models=False),
        phases=bench.phases,
    )
    bench.phases = fitting.phases
    clear_foreign(work, fitting)
    outcome = fitting.run(resume=True)
    final = fitting.evaluate(bench.guide)
    assert fitting.checks is not None and bench.facts is not None
    with repeatable(config.deterministic):
        drift = measure_drift(fitting.shown, fitting.checks)
    if task.kind == "teacher":
        save(fitting.shown, store.teacher_folder(task.key))
    evaluations = list({record["step"]: record for record in read_log(work) if record["kind"] == "eval"}.values())
    seconds, device = evaluations[-1]["seconds"], processes.device
    data = identity_of(task).data
    return Run(
        **head_of(task, task.kind),
        environment=Environment(**environment(device), packages=packages()),
        data=DataFacts(data.name, data.digest, len(sets[0]), len(final.labels)),
        model=bench.facts,
        accuracy=accuracy(final, evaluations),
        training=Training(seconds, outcome.images_per_second, None, device.type, 1),
        drift=drift,
        conversion=conversion(bench, final, evaluations[0]["top1"]) if bench.guide is not None else None,
        seconds=0.0,
    )


def facts(model: nn.Module, size: int) -> ModelFacts:
    return ModelFacts(count_parameters(model), count_macs(model, (3, size, size)), tokens_of(model, size))


def accuracy(final: Evaluation, evaluations: list[dict[str, Any]]) -> Accuracy:
    """What the last weights get right, image by image too, and how it came about."""
    names = ("epoch", "top1", "loss", "seconds")
    return Accuracy(
        epochs=tuple(EpochAccuracy(**{name: record[name] for name in names}) for record in evaluations),
        top1=final.top1,
        top5=final.top5,
        best=max(record["top1"] for record in evaluations),
        standard_error=final.standard_error,
        loss=final.loss,
        correct=base64.b64encode(np.packbits(final.correct).tobytes()).decode(),
    )


def conversion(bench: Bench, final: Evaluation, zero_shot: float) -> Conversion:
    assert final.teacher is not None
    teacher_top1 = 100 * float((final.teacher == final.labels).mean())
    return Conversion(zero_shot, teacher_top1, final.agreement, final.kl, bench.report, bench.layers)


class Memory:
    """The most memory that training took on a GPU, evaluations left out; none on the CPU. It hears the log on its way
    to `watch`: training ends in a `train` record and begins again after an `eval`."""

    def __init__(self, device: torch.device, watch: Watch | None) -> None:
        self.device, self.watch = device, watch
        self.windows: list[int] = []

    def hear(self, record: dict[str, Any]) -> None:
        if self.device.type == "cuda" and record["kind"] == "train":
            self.windows.append(torch.cuda.max_memory_allocated(self.device))
        elif self.device.type == "cuda" and record["kind"] == "eval":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.watch is not None:
            self.watch(record)

    @property
    def peak(self) -> int | None:
        """Without the sets on the device. A step that is replayed as a CUDA graph allocates nothing, so it is the first
        windows that tell."""
        sets = sum(p.pictures.nbytes + p.labels.nbytes for p in SHARED.held.values())
        return max(self.windows) - sets if self.windows else None


def clear_foreign(work: Path, fitting: Fitting) -> None:
    """Begin again where the work folder cannot be gone on with: another version's, or damaged."""
    checkpoints = fitting.engine.state.files
    if not work.exists() or checkpoints is None:
        return
    try:
        check_same(work, fitting.config, fitting.identity)
        checkpoints.latest(lambda text: None)
    except LinvitError:
        shutil.rmtree(work)


@contextmanager
def fixed_threads(device: torch.device, count: int) -> Iterator[None]:
    """On the CPU, sums depend on the number of threads: it must not depend on who started the process."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads(macs: float = math.inf) -> int:
    """How many threads a training on the CPU has, by the MACs of a step: small ones run better side by side."""
    return min(THREADS, os.cpu_count() or 1) if macs > SMALL else 1


def packages() -> dict[str, str]:
    """Versions of what results may depend on."""
    return {name: found for name in PACKAGES if (found := package(name)) is not None}
