"""What a grid costs before it is run: parameters and MACs of every candidate, and about how long the runs will take.

A run's work is its MACs: three for every image trained on, one for every image evaluated. How many MACs a second the
device gets through is taken from runs that are finished on it, else from a few training steps of the softmax model. It
is a guess: mechanisms differ in how well they use a device, and compiled training is faster than these steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from linvit import clock
from linvit.comparison.description.building import build_model
from linvit.comparison.description.job import DataDescription, Job
from linvit.comparison.results import SOFTMAX, ModelFacts, Run, Structure, TrainingIdentity
from linvit.comparison.scheduling.execution.passes import training_pass
from linvit.comparison.scheduling.execution.running import facts, fixed_threads, threads
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from linvit.measurement.record import hardware
from linvit.training import Config

Sets = dict[str | None, DataDescription]  # by digest
BUDGET = 4.0  # seconds for the steps
STEP = 4e9  # MACs of a step on the CPU, at most: a larger one would take too long
LEAST = 2  # images of a step: UPerNet's batch norm wants them


@dataclass(frozen=True)
class GridRow:
    """A candidate at one patch and image size, with its runs."""

    jobs: tuple[Job, ...]
    left: tuple[Job, ...]  # those that are not finished
    model: ModelFacts
    seconds: float | None = None  # for those, on one device


@dataclass(frozen=True)
class Guess:
    """How long a grid takes on one device, and how that was guessed."""

    rows: tuple[GridRow, ...]
    seconds: float | None
    how: str


def estimate(jobs: Sequence[Job], store: Store | None, data: Sets, device: str) -> Guess:
    """The rows of a grid with the time each will take. `data` says how many images there are."""
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        if job.kind != "speed":
            groups.setdefault((job.kind, job.label.mode, job.candidate_key), []).append(job)
    counted = {key: count(job.identity) for (_, _, key), (job, *_) in groups.items()}
    rows = []
    for (_, _, key), found in groups.items():
        left = tuple(job for job in found if store is None or not store.finished(job))
        rows.append(GridRow(tuple(found), left, counted[key]))
    unknown = next((facts.name for facts in data.values() if facts.train is None), None)
    if unknown is not None or not rows:
        how = f"how long is not known without the data ({unknown})" if rows else "there is nothing to train"
        return Guess(tuple(rows), None, how)
    speed, how = speed_of(rows, store, data, device)
    work = [sum(work_of(row.model.macs, job.training, data) for job in row.left) for row in rows]
    timed = tuple(replace(row, seconds=macs / speed) for row, macs in zip(rows, work, strict=True))
    return Guess(timed, sum(work) / speed, how)


def count(structure: Structure) -> ModelFacts:
    """Parameters, MACs and tokens of a structure. Nothing is computed for it."""
    with torch.device("meta"):
        return facts(build_model(structure), structure.size)


def work_of(macs: int, identity: TrainingIdentity, data: Sets) -> float:
    """The MACs of a whole run; a teacher's pass over every image where there is one."""
    images = data[identity.data.digest]
    assert images.train is not None and images.validation is not None
    config = Config.from_dict(identity.config)
    epochs = sum(stage.epochs for stage in config.plan_of_stages())
    passes = 4 if config.needs_teacher else 3
    return macs * (passes * images.train * epochs + images.validation * (1 + epochs / config.eval_epochs))


def speed_of(rows: Sequence[GridRow], store: Store | None, data: Sets, device: str) -> tuple[float, str]:
    """MACs a second on this device, and where that comes from."""
    chip = hardware(device)
    speeds = [
        work_of(run.model.macs, run.identity, data) / run.seconds
        for run in (store.results() if store is not None else ())
        if isinstance(run, Run) and run.environment.hardware == chip and run.identity.data.digest in data
    ]
    if speeds:
        return median(speeds), f"from {len(speeds)} finished runs on {chip}"
    found = calibrate(rows[0].jobs[0].training, device)
    return found, f"from a few training steps of softmax on {chip}, not compiled; MACs decide the rest"


def calibrate(identity: TrainingIdentity, device: str) -> float:
    """MACs a second in training steps of the softmax model."""
    config, softmax = Config.from_dict(identity.config), replace(identity, candidate=SOFTMAX)
    macs, where = count(softmax).macs, torch.device(device)
    model = build_model(softmax).to(where)
    batch = max(LEAST, min(config.batch_size, int(STEP / macs))) if device == "cpu" else config.batch_size
    while True:
        try:
            with fixed_threads(where, threads(macs * config.batch_size)):
                images = torch.randn(batch, 3, identity.size, identity.size, device=where)
                step = training_pass(model, images, config.precision)
                step()  # warms up
                return 3 * macs * batch / (clock.by_turns([step], where, latency=True, budget=BUDGET)[0].median / 1e3)
        except torch.OutOfMemoryError:
            if batch <= LEAST:
                raise LinvitError(f"not even {LEAST} images of {identity.size} pixels can be trained here") from None
            batch //= 2
