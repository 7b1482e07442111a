from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from linvit import clock
from linvit.codec import to_plain
from linvit.comparison.description.job import Job
from linvit.comparison.results import SOFTMAX, SpeedPoint, Structure
from linvit.comparison.scheduling.execution import measuring
from linvit.comparison.scheduling.execution.measuring import Contender, devices_for, measure_speed
from linvit.comparison.scheduling.execution.running import execute
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from tests.comparison.jobs import without_timings
from tests.comparison.small import FAIR, jobs

CPU = torch.device("cpu")


def point_at(size: int, batch: int, **more: Any) -> SpeedPoint:
    return SpeedPoint(device="cpu", size=size, tokens=0, batch=batch, precision="fp32", **more)


def speed(candidate: str, **measure: Any) -> Job:
    given = {"size": [32, 64], "batch": 4, "devices": ["cpu"], **measure}
    return next(job for job in jobs(candidate, measure=given) if job.kind == "speed")


def test_rows_of_a_speed_job(tmp_path: Path) -> None:
    job = speed("stella")
    heard: list[dict[str, Any]] = []
    result = execute(job, Store(tmp_path), watch=heard.append)
    json.dumps(to_plain(result), allow_nan=False)
    rows = result.rows
    wanted = [(32, 16, 1, "inference"), (32, 16, 4, "inference"), (32, 16, 4, "training")]
    wanted += [(64, 64, 1, "inference"), (64, 64, 4, "inference")]
    assert [(row.size, row.tokens, row.batch, row.what) for row in rows] == wanted
    for row in rows:
        assert (row.device, row.precision, row.compiled, row.note) == ("cpu", "fp32", False, None)
        times = row.milliseconds
        assert 0 < times.low <= times.median <= times.high
        assert row.images_per_second == pytest.approx(row.batch / times.median * 1e3)
        assert row.ratio > 0 and row.peak_bytes > 0
    peaks = [row.peak_bytes for row in rows]
    assert peaks[4] > peaks[3] > peaks[0] and peaks[2] > peaks[1], "more images, pixels or gradients take more memory"
    assert heard == [{"kind": "speed", **to_plain(row)} for row in rows]
    assert result.kind == "speed" and result.environment.hardware
    assert Store(tmp_path).write(job, result) and Store(tmp_path).finished(job)
    assert all(row.milliseconds is None for row in without_timings(result).rows)


def test_softmax_is_its_own_measure() -> None:
    rows = measure_speed(speed("softmax", size=[32]).identity, budget=0.01)[1]
    assert [row.ratio for row in rows] == [1.0] * 3


def test_fixed_token_counts_are_built_for_each_size() -> None:
    rows = measure_speed(speed("linformer", batch=1).identity, budget=0.01)[1]
    assert [(row.size, row.note) for row in rows] == [(32, None), (32, None), (64, None)]


def test_what_does_not_fit_is_a_row_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax out of memory takes the ratio away, the candidate out of memory the row's numbers; the rest goes on."""
    real = Contender.call

    def full(self: Contender, point: SpeedPoint) -> Any:
        name = self.structure.candidate.name
        if (name, point.size, point.batch) in (("softmax", 32, 4), ("stella", 64, 1)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")
        return real(self, point)

    monkeypatch.setattr(Contender, "call", full)
    first, batch, training, image, last = measure_speed(speed("stella").identity, budget=0.01)[1]
    assert first.ratio and last.ratio and last.note is None
    assert batch.milliseconds and batch.ratio is None and batch.note is None
    assert training.ratio is None
    assert image.milliseconds is image.ratio is image.peak_bytes is None and image.note == "out of memory"


def test_numbers_that_are_none_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, images: Any, dtype: str, compiled: bool = False) -> Any:
        return lambda: torch.full((1, 10), torch.nan)

    monkeypatch.setattr(measuring, "inference_pass", broken)
    rows = measure_speed(speed("stella", size=[64]).identity, budget=0.01)[1]
    assert [row.note for row in rows] == ["the output is not finite"] * 2
    assert all(row.milliseconds is None for row in rows)


def test_both_are_replayed_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax that can be recorded is not held against a candidate that cannot."""
    plain: list[str] = []
    replays: list[str] = []

    def call(name: str) -> Any:
        return lambda: plain.append(name)

    def record(given: Any) -> Any:
        given[0]()
        if plain[-1] == "asks the host":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: replays.append("")

    monkeypatch.setattr(clock, "record", record)
    point = point_at(32, 4, cuda_graph=True)
    job = speed("stella")
    ours, softmax = (Contender(job.identity, c) for c in (job.identity.candidate, SOFTMAX))
    replayed, times = measuring.clocked({ours: call("ours"), softmax: call("softmax")}, point, 0.001)
    assert replayed and len(times) == 2 and plain == ["ours", "softmax"] and len(replays) > 4
    replays.clear()
    replayed, times = measuring.clocked({softmax: call("softmax"), ours: call("asks the host")}, point, 0.001)
    assert not replayed and len(times) == 2 and not replays and plain.count("softmax") > 4


def test_what_takes_too_long_is_left_out() -> None:
    """A linear candidate's time grows with the tokens, softmax's with their square."""
    job = speed("stella")
    linear, softmax = (Contender(job.identity, c) for c in (job.identity.candidate, SOFTMAX))
    for contender in (linear, softmax):
        contender.build(32, CPU)
        contender.learn(point_at(32, 2), 200.0)
        contender.build(64, CPU)
    point = point_at(64, 1)
    assert linear.guess(point) == pytest.approx(0.4) and softmax.guess(point) == pytest.approx(1.6)
    with pytest.raises(LinvitError, match="about 102 s a pass"):
        softmax.call(point_at(64, 64))


def test_a_size_the_architecture_cannot_have_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measuring.build_model

    def build(structure: Structure) -> Any:
        if structure.size == 64:
            raise LinvitError("64 pixels cannot be cut into patches")
        return real(structure)

    monkeypatch.setattr(measuring, "build_model", build)
    rows = measure_speed(speed("stella").identity, budget=0.01)[1]
    assert [row.note for row in rows] == [None] * 3 + ["64 pixels cannot be cut into patches"] * 2


def test_tokens_are_those_of_the_model() -> None:
    vit = {"model": "vit", "width": 16, "depth": 1, "heads": 2}
    given = {"size": [36], "batch": 1, "devices": ["cpu"]}
    for architecture, tokens in ((vit, 16), (FAIR, 25)):  # one drops the edge, the other pads it
        job = next(t for t in jobs("stella", architecture=architecture, measure=given) if t.kind == "speed")
        assert measure_speed(job.identity, budget=0.01)[1][0].tokens == tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has every device")
def test_devices() -> None:
    assert devices_for(speed("stella", devices=[]).identity) == [CPU]
    with pytest.raises(LinvitError, match="none of the devices to measure on: cuda"):
        devices_for(speed("stella", devices=["cuda"]).identity)


def test_calls_are_timed_by_turns() -> None:
    turns: list[str] = []
    found = clock.by_turns([lambda: turns.append("a"), lambda: turns.append("b")], CPU, latency=True, budget=0.001)
    assert "".join(turns) == "ab" * (len(turns) // 2) and len(found) == 2
    assert found[0].repeats == found[1].repeats == len(turns) // 2 - 1 >= 3
