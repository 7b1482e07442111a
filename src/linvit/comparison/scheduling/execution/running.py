"""One job carried out, from its identity to its result.

The result depends on the identity alone: not on the place, on what ran before in this process, or on whether the run
was killed in between. Only timings and memory differ.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linvit.comparison import results
from linvit.comparison.description.job import Job
from linvit.comparison.results import Environment, ModelFacts, Run, Speed, SpeedIdentity
from linvit.comparison.scheduling.execution.judging import judge
from linvit.comparison.scheduling.execution.machine import training_on
from linvit.comparison.scheduling.execution.measuring import measure_speed, tokens_of
from linvit.comparison.scheduling.execution.sharing import Bench, Shared
from linvit.comparison.scheduling.store import Store, head_of
from linvit.conversion import save
from linvit.errors import LinvitError
from linvit.measurement import count_macs, count_parameters
from linvit.measurement.record import environment, package
from linvit.models.dense import DenseModel
from linvit.tasks.checks import check_same
from linvit.tasks.classify.fitting import ClassifierFitting, Sets
from linvit.tasks.dense.fitting import DenseFitting
from linvit.tasks.features.fitting import FeatureFitting
from linvit.tasks.fitting import Fitting
from linvit.training import Config, Output, Processes, make_processes
from linvit.training.logs import read_log

THREADS = 4  # at most, of a training on the CPU
SMALL = 2e9  # MACs of a step below which it has one
PACKAGES = ("torch", "torchvision", "timm", "safetensors", "numpy", "scipy", "scikit-learn", "triton")
SHARED = Shared()
Watch = Callable[[dict[str, Any]], None]


def execute(
    job: Job, store: Store, *, device: str = "auto", shared: int = 1, watch: Watch | None = None
) -> Run | Speed:
    """Do a job and give its result. A training that was killed goes on from the store's work folder. `shared` is how
    many runs have the device now; `watch` hears the training's log."""
    began = time.perf_counter()
    found: Run | Speed
    if isinstance(job.identity, SpeedIdentity):
        SHARED.clear()  # the device is for what is timed
        where, rows = measure_speed(job.identity, watch=watch)
        found = Speed(**head_of(job, "speed"), environment=where, rows=rows, seconds=0.0)
    else:
        found = train(job, store, device, shared, watch)
    return replace(found, seconds=round(time.perf_counter() - began, 3))


def train(job: Job, store: Store, device: str, shared: int, watch: Watch | None) -> Run:
    """A run or a teacher."""
    config = Config.from_dict(job.training.config)
    SHARED.sharing = shared
    processes = make_processes(config, device)
    memory = Memory(processes.device, watch)
    try:
        with training_on(processes.device):
            found = prepared(job, store, config, processes, memory)
    except BaseException:
        SHARED.forget()
        raise
    if config.mesa:  # its stages belong to the moving average of this run
        SHARED.forget()
    return replace(found, training=replace(found.training, peak_bytes=memory.peak, shared=shared))


def prepared(job: Job, store: Store, config: Config, processes: Processes, memory: "Memory") -> Run:
    """The run, on a bench that is made or found."""
    with fixed_threads(processes.device, threads()):
        bench = SHARED.prepare(job, store, config, processes.device)
        bench.facts = bench.facts or facts(bench.model, job.identity.size)
    with fixed_threads(processes.device, threads(bench.facts.macs * config.batch_size)):
        return train_on(bench, job, store, config, processes, memory)


def train_on(bench: Bench, job: Job, store: Store, config: Config, processes: Processes, memory: "Memory") -> Run:
    sets = SHARED.data(job)
    work = store.work_folder(job.key)
    kind: Any = ClassifierFitting if isinstance(sets, Sets) else DenseFitting
    kind = FeatureFitting if job.training.task == "features" else kind
    fitting: ClassifierFitting | DenseFitting | FeatureFitting = kind(
        bench.model,
        sets,
        config,
        teacher=bench.guide,
        processes=processes,
        output=Output(work, memory.hear, {"task": job.key}, models=False),
        phases=bench.phases,
    )
    bench.phases = fitting.phases
    clear_foreign(work, fitting)
    try:
        outcome = fitting.run(resume=True)
        evaluations = list({record["step"]: record for record in read_log(work) if record["kind"] == "eval"}.values())
        judged = judge(fitting, bench, evaluations)
    finally:
        fitting.close_sources()
    if job.kind == "teacher":
        save(fitting.shown, store.teacher_folder(job.key))
    assert bench.facts is not None
    seconds, device = evaluations[-1]["seconds"], processes.device
    packages = {name: found for name in PACKAGES if (found := package(name)) is not None}
    data = job.training.data
    return Run(
        **head_of(job, job.kind),
        environment=Environment(**environment(device), packages=packages),
        data=results.DataFacts(data.name, data.digest, len(sets.train), judged.images),
        model=bench.facts,
        accuracy=judged.accuracy,
        training=results.Training(seconds, outcome.images_per_second, None, device.type, 1),
        drift=judged.drift,
        conversion=judged.conversion,
        seconds=0.0,
    )


def facts(model: nn.Module, size: int) -> ModelFacts:
    """What is counted of a model. What a detector does with its proposals depends on the image: of such a one the
    backbone's MACs are counted, which are all that a candidate changes."""
    part = model.backbone if isinstance(model, DenseModel) and model.task == "detect" else model
    counted = "backbone" if part is not model else None
    return ModelFacts(count_parameters(model), count_macs(part, (3, size, size)), tokens_of(model, size), counted)


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
    if work.exists() and checkpoints is not None:
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
