"""Tasks and results that cost nothing, for the store and the engines; also used in worker processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from linvit.comparison.grid import Task
from linvit.comparison.identity import digest, key_of
from linvit.comparison.store import Store, hardware_for


def make_task(number: int, kind: str = "run", needs: tuple[str, ...] = (), **extra: Any) -> Task:
    identity = {"kind": kind, "seed": number, "devices": ["cpu"], **extra}
    label = {
        "candidate": f"c{number}",
        "mechanism": "stella",
        "paper": "MixA",
        "patch": 4,
        "size": 32,
        "mode": "scratch",
    }
    return Task(kind, key_of(identity), identity, digest(number), {**label, "seed": number}, needs)


def make_result(task: Task, time: str = "2026-01-01T00:00:00+00:00", **extra: Any) -> dict[str, Any]:
    return {
        "kind": task.kind,
        "version": 1,
        "key": task.key,
        "candidate_key": task.candidate_key,
        "label": task.label,
        "identity": task.identity,
        "command": task.command,
        "environment": {"hardware": hardware_for(task), "time": time},
        **extra,
    }


def note(store: Store, task: Task, what: str) -> None:
    """A line in a log that all processes share, written in one go."""
    handle = os.open(store.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{what} {task.key} {os.getpid()} {time.monotonic()}\n".encode())
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


def quick(task: Task, store: Store, *, device: str, shared: int, watch: Any) -> dict[str, Any]:
    """Does nothing, in a moment; odd things happen to tasks that ask for them."""
    note(store, task, "begin")
    watch({"kind": "train", "step": 1, "steps": 2, "epoch": 0.5, "loss": 1.0, "images_per_second": 10.0, "stage": "t"})
    time.sleep(task.identity.get("seconds", 0.0))
    if task.identity.get("meet"):
        meet(store.folder / "meeting", task.key)
    if task.identity.get("error"):
        raise RuntimeError(task.identity["error"])
    work = store.work_folder(task.key)
    work.mkdir(parents=True, exist_ok=True)
    (work / "tries").open("a").write("x")
    if len((work / "tries").read_text()) <= task.identity.get("deaths", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    note(store, task, "end")
    return make_result(task, device=device, shared=shared)
