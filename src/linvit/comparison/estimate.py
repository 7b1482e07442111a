"""What a grid costs before it is run: parameters and MACs of every candidate, and about how long the runs will take.

A run's work is its MACs: three for every image trained on, one for every image evaluated. How many MACs a second the
device gets through is taken from runs that are finished on it, else from a few training steps of the softmax model. It
is a guess: mechanisms differ in how well they use a device, and compiled training is faster than these steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from linvit.comparison.building import become, build_softmax
from linvit.comparison.grid import SOFTMAX, Task
from linvit.comparison.running import facts, fixed_threads, threads
from linvit.comparison.store import Store
from linvit.errors import LinvitError
from linvit.measurement.record import hardware
from linvit.training.config import Config

BUDGET = 4.0  # seconds for the steps
STEP = 4e9  # MACs of a step on the CPU, at most: a larger one would take too long


@dataclass(frozen=True)
class Row:
    """A candidate at one patch and image size, with its runs."""

    kind: str
    candidate: str
    mode: str
    patch: int | None
    size: int
    parameters: int
    macs: int
    tokens: int | None
    tasks: tuple[Task, ...]
    left: tuple[Task, ...]  # those that are not finished
    seconds: float | None = None  # that are left, on one device


@dataclass(frozen=True)
class Guess:
    """How long a grid takes on one device, and how that was guessed."""

    rows: tuple[Row, ...]
    seconds: float | None
    how: str


def estimate(tasks: Sequence[Task], store: Store | None, data: dict[str | None, dict[str, Any]], device: str) -> Guess:
    """The rows of a grid with the time each will take. `data` says, by digest, how many images there are."""
    runs = [task for task in tasks if task.kind != "speed"]
    groups: dict[tuple[str, str, str], list[Task]] = {}
    for task in runs:
        groups.setdefault((task.kind, task.label["mode"], task.candidate_key), []).append(task)
    counted = {key: count(task.identity) for (_, _, key), (task, *_) in groups.items()}
    rows = [
        Row(
            kind,
            found[0].label["candidate"],
            mode,
            found[0].label["patch"],
            found[0].label["size"],
            **counted[key],
            tasks=tuple(found),
            left=tuple(task for task in found if store is None or not store.finished(task)),
        )
        for (kind, mode, key), found in groups.items()
    ]
    unknown = next((facts["name"] for facts in data.values() if facts["train"] is None), None)
    if unknown is not None or not rows:
        how = f"how long is not known without the data ({unknown})" if rows else "there is nothing to train"
        return Guess(tuple(rows), None, how)
    speed, how = speed_of(rows, store, data, device)
    timed = [with_time(row, data, speed) for row in rows]
    return Guess(tuple(timed), sum(row.seconds or 0 for row in timed), how)


def count(identity: dict[str, Any]) -> dict[str, Any]:
    """Parameters, MACs and tokens of a structure. Nothing is computed for it."""
    with torch.device("meta"):
        return facts(build(identity), identity["size"])


def build(identity: dict[str, Any], candidate: dict[str, Any] | None = None) -> torch.nn.Module:
    shape = {"patch_size": identity["patch_size"], "size": identity["size"], "classes": identity["classes"]}
    model = build_softmax(identity["architecture"], **shape)
    become(model, candidate or identity["candidate"], size=identity["size"])
    return model


def work_of(macs: int, identity: dict[str, Any], data: dict[str | None, dict[str, Any]]) -> float:
    """The MACs of a whole run; a teacher's pass over every image where there is one."""
    images = data[identity["data"]["digest"]]
    config = Config.from_dict(identity["config"])
    epochs = sum(stage.epochs for stage in config.plan_of_stages())
    passes = 4 if config.needs_teacher else 3
    return macs * (passes * images["train"] * epochs + images["validation"] * (1 + epochs / config.eval_epochs))


def with_time(row: Row, data: dict[str | None, dict[str, Any]], speed: float) -> Row:
    seconds = sum(work_of(row.macs, task.identity, data) for task in row.left) / speed
    return Row(**{**row.__dict__, "seconds": seconds})


def speed_of(
    rows: Sequence[Row], store: Store | None, data: dict[str | None, dict[str, Any]], device: str
) -> tuple[float, str]:
    """MACs a second on this device, and where that comes from."""
    chip = hardware(device)
    speeds = []
    for result in (store.results("run") + store.results("teacher")) if store is not None else ():
        if result["environment"]["hardware"] == chip and result["identity"]["data"]["digest"] in data:
            speeds.append(work_of(result["model"]["macs"], result["identity"], data) / result["seconds"])
    if speeds:
        return median(speeds), f"from {len(speeds)} finished runs on {chip}"
    found = calibrate(rows[0].tasks[0].identity, device)
    return found, f"from a few training steps of softmax on {chip}, not compiled; MACs decide the rest"


def calibrate(identity: dict[str, Any], device: str) -> float:
    """MACs a second in training steps of the softmax model."""
    config = Config.from_dict(identity["config"])
    macs = count({**identity, "candidate": SOFTMAX})["macs"]
    model = build(identity, SOFTMAX).to(device).train()
    batch = max(1, min(config.batch_size, int(STEP / macs))) if device == "cpu" else config.batch_size
    while True:
        try:
            with fixed_threads(torch.device(device), threads(macs * config.batch_size)):
                return 3 * macs * batch / step_seconds(model, batch, identity["size"], config, device)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise LinvitError(f"not even one image of {identity['size']} pixels can be trained here") from None
            batch //= 2


def step_seconds(model: torch.nn.Module, batch: int, size: int, config: Config, device: str) -> float:
    """The time of a step without the first one, which warms up."""
    images = torch.randn(batch, 3, size, size, device=device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision, torch.float32)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 2 or (time.perf_counter() - began < BUDGET and len(times) < 20):
        start = time.perf_counter()
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss = model(images).float().square().mean()
        loss.backward()
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])
