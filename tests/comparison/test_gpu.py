"""What only a GPU shows of a comparison: compiled and recorded steps that serve the next seed, and its clocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from linvit import clock
from linvit.comparison.scheduling.execution import running
from linvit.comparison.scheduling.execution.measuring import measure_speed
from linvit.comparison.scheduling.execution.running import execute
from linvit.comparison.scheduling.execution.sharing import Shared
from linvit.comparison.scheduling.store import Store
from tests.comparison.jobs import without_timings
from tests.comparison.small import jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("candidate", ["stella", "castling", "mixa:keep=1"])
def test_the_next_seed_is_all_training(tmp_path: Path, candidate: str) -> None:
    settings = ("precision=bf16", "ema=0.5", "drop_path=0.1", "mixup=0.5", "randaugment=rand-m9-mstd0.5-inc1")
    first, second = jobs(candidate, seeds=[0, 1], settings=(*settings, "epochs=4"))
    running.SHARED = Shared()
    execute(first, Store(tmp_path), device="cuda")
    graphs = counters["stats"]["unique_graphs"]
    reused = execute(second, Store(tmp_path), device="cuda")
    assert counters["stats"]["unique_graphs"] == graphs, "the second seed compiles nothing"
    assert reused.seconds - reused.training.seconds < 2
    assert reused.training.peak_bytes > 0
    running.SHARED = Shared()
    assert without_timings(execute(second, Store(tmp_path / "b"), device="cuda")) == without_timings(reused)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_ladder_on_the_gpu(compiled: bool) -> None:
    given = {"size": [32, 64], "batch": 64, "devices": ["cuda"], "compile": compiled}
    job = next(job for job in jobs("stella", measure=given) if job.kind == "speed")
    rows = measure_speed(job.identity, budget=0.05)[1]
    assert [row.note for row in rows] == [None] * 5
    assert all(row.cuda_graph and row.compiled == compiled for row in rows)
    assert all(row.precision == "bf16" and row.ratio > 0 and row.peak_bytes > 0 for row in rows)


class Operations(TorchDispatchMode):
    """Counts what Python asks PyTorch to do."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_a_replayed_pass_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts no operation from Python; and its peak memory is that of the pass, not of the replay."""
    asked: list[int] = []
    by_turns = clock.by_turns

    def watched(calls: Any, *args: Any, **options: Any) -> Any:
        for call in calls:
            with Operations() as operations:
                call()
            asked.append(operations.number)
        return by_turns(calls, *args, **options)

    monkeypatch.setattr(clock, "by_turns", watched)
    peaks = []
    for replayed in (False, True):
        given = {"size": [32], "batch": 8, "devices": ["cuda"], "cuda_graph": replayed}
        job = next(job for job in jobs("stella", measure=given) if job.kind == "speed")
        asked.clear()
        peaks.append([row.peak_bytes for row in measure_speed(job.identity, budget=0.05)[1]])
        assert asked and all((number == 0) == replayed for number in asked)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)
