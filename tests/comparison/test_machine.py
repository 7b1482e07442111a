"""Timings on one machine: one at a time, and marked where a training has the device."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from linvit.comparison.reporting import gather, spreadsheet
from linvit.comparison.reporting.caveats import caveats
from linvit.comparison.results import SOFTMAX, SpeedIdentity
from linvit.comparison.scheduling.execution.machine import timing_on, training_on
from linvit.comparison.scheduling.execution.measuring import measure_speed
from linvit.comparison.scheduling.places.place import Here
from linvit.comparison.scheduling.scheduler import run
from linvit.comparison.scheduling.store import Store
from tests.comparison.jobs import log, make_job, quick
from tests.comparison.synthetic import write_store

fork = multiprocessing.get_context("fork")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of our own: others may run tests on this one."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "machine"))


def hold(what: str, pipe: Any) -> None:
    with (timing_on if what == "timing" else training_on)(CPU):
        pipe.send("held")
        pipe.recv()
    pipe.send(time.monotonic())


def holding(what: str) -> tuple[Any, Any]:
    """Another process that times or trains until it is told to stop."""
    ours, theirs = fork.Pipe()
    other = fork.Process(target=hold, args=(what, theirs))
    other.start()
    assert ours.recv() == "held"
    return other, ours


def stop(other: Any, pipe: Any) -> float:
    pipe.send("stop")
    ended: float = pipe.recv()
    other.join()
    return ended


IDENTITY = SpeedIdentity(
    architecture={"model": "vit", "width": 16, "depth": 1, "heads": 1},
    classes=2,
    candidate=SOFTMAX,
    patch_size=8,
    size=16,
    ladder=(16,),
    batch=1,
    precision="fp32",
    compile=False,
    devices=("cpu",),
)


def test_a_timing_beside_a_training_is_marked() -> None:
    other, pipe = holding("training")
    rows = measure_speed(IDENTITY, budget=0.01)[1]
    assert rows and all(row.shared for row in rows)
    with training_on(CPU):  # trainings do not wait for each other
        pass
    stop(other, pipe)
    assert not any(row.shared for row in measure_speed(IDENTITY, budget=0.01)[1])


@pytest.mark.parametrize("waiting", [timing_on, training_on])
def test_a_timing_is_waited_for(waiting: Any) -> None:
    other, pipe = holding("timing")
    began = time.monotonic()
    late = fork.Process(target=late_stop, args=(pipe,))
    late.start()
    with waiting(CPU):
        assert time.monotonic() - began > 0.25
    late.join()
    other.join()


def late_stop(pipe: Any) -> None:
    time.sleep(0.3)
    pipe.send("stop")


def test_runs_of_the_store_on_this_machine_end_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linvit.comparison.scheduling.scheduler.POLL", 0.02)
    jobs = [make_job(1, seconds=0.6), make_job(2, "speed")]
    other = fork.Process(target=run, args=(jobs[:1], Store(tmp_path), Here(quick)), kwargs={"watch": print_nothing})
    other.start()
    until = time.monotonic() + 20
    while not (tmp_path / "log").exists() and time.monotonic() < until:
        time.sleep(0.01)
    run(jobs, Store(tmp_path), Here(quick), watch=print_nothing)
    other.join()
    assert [(what, key) for what, key, *_ in log(tmp_path)] == [
        *(("begin", jobs[0].key), ("end", jobs[0].key)),
        *(("begin", jobs[1].key), ("end", jobs[1].key)),
    ]


def print_nothing(*_: Any) -> None:
    pass


def test_the_report_says_so(tmp_path: Path) -> None:
    small: dict[str, Any] = {"patches": [4], "sizes": (64,), "seeds": (0,), "epochs": 2}
    store = write_store(tmp_path / "s", mechanisms=["softmax", "stella"], **small)
    contents = gather([store])
    assert not any("while other trainings" in text for text in caveats(contents.results, contents.settings))
    path = min(store.glob("speeds/*.json"))
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row["shared"] = True
    path.write_text(json.dumps(data))
    contents = gather([store])
    (said,) = (text for text in caveats(contents.results, contents.settings) if "while other trainings" in text)
    assert said.startswith(f"{len(data['rows'])} of ")
    lines = csv.DictReader(io.StringIO(spreadsheet(contents)))
    assert sum(line["shared"] == "True" for line in lines) == len(data["rows"])
