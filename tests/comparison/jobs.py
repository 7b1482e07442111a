"""Jobs and results that cost nothing, for the store and the places; also used in worker processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from linvit.comparison.description.job import Job
from linvit.comparison.results import (
    Accuracy,
    Candidate,
    DataFacts,
    Environment,
    Identity,
    Label,
    ModelFacts,
    Named,
    Run,
    Speed,
    SpeedIdentity,
    TrainedTeacher,
    Training,
    TrainingIdentity,
)
from linvit.comparison.scheduling.store import Store, hardware_for, head_of
from linvit.errors import Unwritable


def make_job(number: int, kind: str = "run", needs: tuple[str, ...] = (), **extra: Any) -> Job:
    """What is odd about a job stands among the settings of its architecture."""
    structure: dict[str, Any] = {
        "architecture": {"model": "fair", "number": number, **extra},
        "classes": 10,
        "candidate": Candidate("stella"),
        "patch_size": 4,
        "size": 32,
    }
    identity: Identity
    if kind == "speed":
        identity = SpeedIdentity(**structure, ladder=(32,), batch=1, precision="fp32", compile=False, devices=("cpu",))
    else:
        data = Named("digits", None)
        identity = TrainingIdentity(**structure, kind=kind, mode="scratch", data=data, config={}, seed=number)
        for key in needs:
            identity = replace(identity, teacher=TrainedTeacher(key, replace(identity, kind="teacher")))
    label = Label(
        candidate=f"c{number}", mechanism="stella", paper="MixA", patch=4, size=32, mode="scratch", seed=number
    )
    return Job(identity, label)


def make_result(
    job: Job, time: str = "2026-01-01T00:00:00+00:00", hardware: str = "", top1: float = 0.0, **extra: Any
) -> Run | Speed:
    where = Environment(hardware=hardware or hardware_for(job), time=time, threads=extra.pop("threads", None))
    head = {**head_of(job, job.kind), "environment": where, "seconds": 0.0, **extra}
    if job.kind == "speed":
        return Speed(**head, rows=())
    accuracy = Accuracy((), top1, None, top1, None, None, "")
    data, model = DataFacts("digits", None, 1, 1), ModelFacts(1, 1, 1)
    return Run(**{"training": Training(0.0, None, None, "cpu", 1), **head}, data=data, model=model, accuracy=accuracy)


def runs_of(store: Store) -> list[Run]:
    return [result for result in store.results() if isinstance(result, Run) and result.kind == "run"]


def speeds_of(store: Store) -> list[Speed]:
    return [result for result in store.results() if isinstance(result, Speed)]


def note(store: Store, job: Job, what: str) -> None:
    """A line in a log that all processes share, written in one go."""
    handle = os.open(store.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{what} {job.key} {os.getpid()} {time.monotonic()}\n".encode())
    os.close(handle)


def log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def meet(folder: Path, key: str) -> None:
    """Wait for another who is here at the same time."""
    folder.mkdir(exist_ok=True)
    (folder / key).touch()
    until = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2:
        if time.monotonic() > until:
            raise RuntimeError("nobody came")
        time.sleep(0.01)


def quick(job: Job, store: Store, *, device: str, shared: int, watch: Any) -> Run | Speed:
    """Does nothing, in a moment; odd things happen to jobs that ask for them."""
    odd = job.identity.architecture
    note(store, job, "begin")
    watch({"kind": "train", "step": 1, "steps": 2, "epoch": 0.5, "loss": 1.0, "images_per_second": 10.0, "stage": "t"})
    time.sleep(odd.get("seconds", 0.0))
    if odd.get("meet"):
        meet(store.folder / "meeting", job.key)
    if odd.get("error"):
        raise RuntimeError(odd["error"])
    if odd.get("full"):
        raise Unwritable("cannot write the model: No space left on device")
    work = store.work_folder(job.key)
    work.mkdir(parents=True, exist_ok=True)
    (work / "tries").open("a").write("x")
    if len((work / "tries").read_text()) <= odd.get("deaths", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    note(store, job, "end")
    if job.kind == "speed":
        return make_result(job, threads=shared)  # a speed does not say how many shared the device
    return make_result(job, training=Training(0.0, None, None, device, shared))


def without_timings(result: Run | Speed) -> Run | Speed:
    """A result without what may differ when the same job is done again: times, memory, where it was and what else was
    at work there."""
    result = replace(result, environment=Environment(hardware="", time=""), seconds=0.0)
    if isinstance(result, Speed):
        bare: dict[str, Any] = dict.fromkeys(("milliseconds", "images_per_second", "peak_bytes", "ratio"))
        return replace(result, rows=tuple(replace(row, **bare, shared=False) for row in result.rows))
    epochs = tuple(replace(epoch, seconds=0.0) for epoch in result.accuracy.epochs)
    training = Training(0.0, None, None, result.training.device, 0)
    return replace(result, accuracy=replace(result.accuracy, epochs=epochs), training=training)
