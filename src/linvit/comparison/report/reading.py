"""The files of one or more stores, as typed values. What cannot be read is left out, with a note that says so."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from linvit.comparison.identity import counted_config, simple
from linvit.comparison.store import Store
from linvit.errors import LinvitError

KINDS = ("teacher", "run", "speed", "failure")
VERSION = 1
OWN = ("seed", "teacher", "input_size", "eval_epochs")  # of a recipe's config: what runs of one setting may differ in


@dataclass(frozen=True)
class Run:
    """One trained candidate. `data` is the whole file; the rest is what the report sorts by."""

    key: str
    candidate_key: str
    candidate: str
    mechanism: str
    paper: str
    patch: int
    size: int
    seed: int
    mode: str
    top1: float
    setting: str  # digest of what all compared runs have in common
    teacher: str  # key of the teacher's run, or what else tells one teacher from another; empty from scratch
    right: np.ndarray | None = field(repr=False)  # which validation images it got right
    data: dict[str, Any] = field(repr=False)

    def get(self, *path: str) -> Any:
        """A value deep in the file, or None."""
        return get(self.data, *path)

    def number(self, *path: str) -> float | None:
        """A finite number deep in the file, or None."""
        return number(self.get(*path))


@dataclass(frozen=True)
class Timing:
    """One line of a speed file. Times are milliseconds a batch."""

    candidate_key: str
    family: str  # candidate, patch and architecture: joins where the candidate's key does not
    device: str  # cpu or cuda
    hardware: str
    size: int
    tokens: int
    batch: int
    what: str  # inference or training
    precision: str
    compiled: bool
    cuda_graph: bool
    median: float | None
    low: float | None
    high: float | None
    images_per_second: float | None
    peak_bytes: float | None
    ratio: float | None
    note: str


@dataclass
class Results:
    """All that was found."""

    runs: list[Run] = field(default_factory=list)
    teachers: dict[str, Run] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    speeds: list[dict[str, Any]] = field(default_factory=list)  # the speed files, for their commands and environments
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)


def read(stores: Sequence[Path]) -> Results:
    """Everything in these stores. The same file in two of them counts once."""
    results = Results()
    seen: set[tuple[str, str, str]] = set()
    for folder in stores:
        if not folder.exists():
            raise LinvitError(f"no store {folder}: give the folder that `linvit compare -o` wrote")
        results.stores.append(folder.resolve().name)
        store = Store(folder)
        for data in (data for kind in KINDS for data in store.results(kind)):
            hardware = get(data, "environment", "hardware") if data["kind"] == "speed" else ""
            which = (data["kind"], data["key"], str(data.get("attempt", hardware)))
            if which in seen:
                continue
            seen.add(which)
            try:
                add(results, data)
            except (KeyError, TypeError, ValueError, AttributeError) as reason:
                results.notes.append(f"{data['kind']} {data['key']} was left out: it cannot be read ({reason!r}).")
        results.notes += [note.replace(f"{folder}/", "") for note in store.notes]
    finished = {run.key for run in results.runs} | set(results.teachers) | {speed["key"] for speed in results.speeds}
    last = {failure["key"]: failure for failure in sorted(results.failures, key=lambda f: f.get("attempt") or 1)}
    results.failures = [failure for key, failure in last.items() if key not in finished]
    if not results.runs and not results.timings and not results.failures:
        raise LinvitError(f"nothing to report in {', '.join(str(store) for store in stores)}: no result file was found")
    return results


def add(results: Results, data: dict[str, Any]) -> None:
    kind = data["kind"]
    if kind == "failure":
        results.failures.append({**data, "label": dict(data["label"]), "error": str(data["error"])})
        return
    if data["version"] > VERSION:
        raise ValueError(f"it is of version {data['version']}")
    if kind == "speed":
        lines = list(timings(data))
        results.timings += lines
        results.speeds.append(data)
        return
    found = run(data, results.notes)
    if kind == "teacher":
        results.teachers[found.key] = found
    else:
        results.runs.append(found)


def run(data: dict[str, Any], notes: list[str]) -> Run:
    label, identity = data["label"], data["identity"]
    top1 = number(data["accuracy"]["top1"])
    if top1 is None:
        raise ValueError("no top-1")
    common = {
        "mode": label["mode"],
        "architecture": identity.get("architecture"),
        "data": get(identity, "data", "digest") or get(data, "data", "digest"),
        "config": shared_config(identity),
        "teacher": school(identity.get("teacher")),
    }
    return Run(
        key=str(data["key"]),
        candidate_key=str(data["candidate_key"]),
        candidate=str(label["candidate"]),
        mechanism=str(label.get("mechanism") or label["candidate"]),
        paper=str(label.get("paper") or ""),
        patch=int(label.get("patch") or 0),
        size=int(label.get("size") or 0),
        seed=int(label.get("seed") or 0),
        mode=str(label["mode"]),
        top1=top1,
        setting=digest(common),
        teacher=teacher_of(identity.get("teacher")),
        right=right(data, top1, notes),
        data=data,
    )


def shared_config(identity: dict[str, Any]) -> Any:
    """What the runs of one setting have in common of their recipe; fields that came later stand for their defaults."""
    counted = counted_config(identity.get("config") or {})
    return simple({name: value for name, value in counted.items() if name not in OWN})


def school(teacher: Any) -> Any:
    """How a teacher came about. Candidates of one setting may have several, one for each patch and resolution."""
    trained = get(teacher, "identity")
    if not isinstance(trained, dict):
        return teacher_of(teacher)
    return [trained.get("architecture"), trained.get("seed"), shared_config(trained)]


def teacher_of(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("key") or digest(value)
    return str(value or "")


def right(data: dict[str, Any], top1: float, notes: list[str]) -> np.ndarray | None:
    """Which images were got right, if the bits are there and agree with the accuracy they belong to."""
    packed, images = get(data, "accuracy", "correct"), get(data, "data", "validation")
    if not packed or not images:
        return None
    try:
        bits = np.unpackbits(np.frombuffer(base64.b64decode(packed, validate=True), dtype=np.uint8))[: int(images)]
    except (ValueError, TypeError):
        bits = np.zeros(0, dtype=np.uint8)
    if len(bits) != images or abs(100 * float(bits.mean()) - top1) > 51 / images:
        notes.append(f"Run {data['key']}: the images' results do not fit its accuracy; only the total is used.")
        return None
    return bits.astype(bool)


def timings(data: dict[str, Any]) -> Iterator[Timing]:
    label, environment = data["label"], data.get("environment") or {}
    family = digest([label["candidate"], label.get("patch"), get(data, "identity", "architecture")])
    for row in data["rows"]:
        device = str(row["device"])
        chip = environment.get("cpu") if device == "cpu" else environment.get("hardware")
        times = row.get("milliseconds") or {}
        yield Timing(
            candidate_key=str(data["candidate_key"]),
            family=family,
            device=device,
            hardware=str(chip or device),
            size=int(row["size"]),
            tokens=int(row["tokens"]),
            batch=int(row["batch"]),
            what=str(row.get("pass") or "inference"),
            precision=str(row.get("precision") or ""),
            compiled=bool(row.get("compiled")),
            cuda_graph=bool(row.get("cuda_graph")),
            median=number(times.get("median")),
            low=number(times.get("low")),
            high=number(times.get("high")),
            images_per_second=number(row.get("images_per_second")),
            peak_bytes=number(row.get("peak_bytes")),
            ratio=number(row.get("ratio")),
            note=str(row.get("note") or ""),
        )


def family_of(run: Run) -> str:
    """What `Timing.family` is for a run's speeds."""
    return digest([run.candidate, run.data["label"].get("patch"), run.get("identity", "architecture")])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def get(data: Any, *path: str) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        return None
    return float(value)


def average(values: Iterable[float | None]) -> float | None:
    """The mean of those that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
