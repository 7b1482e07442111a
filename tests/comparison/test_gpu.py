"""What only a GPU shows of a comparison: compiled and recorded steps that serve the next seed, and its clocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from linvit.comparison import running
from linvit.comparison.measuring import measure_speed
from linvit.comparison.running import execute, without_timings
from linvit.comparison.sharing import Shared
from linvit.comparison.store import Store
from tests.comparison.small import tasks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("candidate", ["stella", "castling", "mixa:keep=1"])
def test_the_next_seed_is_all_training(tmp_path: Path, candidate: str) -> None:
    settings = ("precision=bf16", "ema=0.5", "drop_path=0.1", "mixup=0.5", "randaugment=rand-m9-mstd0.5-inc1")
    first, second = tasks(candidate, seeds=[0, 1], settings=(*settings, "epochs=4"))
    running.SHARED = Shared()
    execute(first, Store(tmp_path), device="cuda")
    graphs = counters["stats"]["unique_graphs"]
    reused = execute(second, Store(tmp_path), device="cuda")
    assert counters["stats"]["unique_graphs"] == graphs, "the second seed compiles nothing"
    assert reused["seconds"] - reused["training"]["seconds"] < 2
    assert reused["training"]["peak_bytes"] > 0
    running.SHARED = Shared()
    assert without_timings(execute(second, Store(tmp_path / "b"), device="cuda")) == without_timings(reused)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_ladder_on_the_gpu(compiled: bool) -> None:
    given = {"sizes": [32, 64], "batch": 64, "devices": ["cuda"], "compile": compiled}
    task = next(task for task in tasks("stella", measure=given) if task.kind == "speed")
    rows = measure_speed(task, budget=0.05)["rows"]
    assert [row["note"] for row in rows] == [None] * 5
    assert all(row["cuda_graph"] and row["compiled"] == compiled for row in rows)
    assert all(row["precision"] == "bf16" and row["ratio"] > 0 and row["peak_bytes"] > 0 for row in rows)


@pytest.mark.parametrize("which", ["inference", "training"])
def test_a_replayed_pass_does_not_wait_for_python(which: str) -> None:
    """So small a model is all overhead; and peak memory is that of the pass, not of its replay."""
    found = []
    for graph in (False, True):
        given = {"sizes": [32], "batch": 8, "devices": ["cuda"], "cuda_graph": graph}
        task = next(task for task in tasks("stella", measure=given) if task.kind == "speed")
        rows = measure_speed(task, budget=0.05)["rows"]
        found.append(next(row for row in rows if row["pass"] == which and row["batch"] == 8))
    plain, replayed = found
    assert replayed["milliseconds"]["median"] < 0.7 * plain["milliseconds"]["median"]
    assert replayed["peak_bytes"] == pytest.approx(plain["peak_bytes"], rel=0.1)
