"""Signals: a run that is told to stop keeps what it has, and says where it goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import linvit
from linvit.training.checkpoints import resumes_after
from linvit.training.config import Stage
from linvit.training.engine.stopping import Stopped
from linvit.training.logs import read_log
from tests.training.test_checkpoints import RICH, rich_model
from tests.training.toys import accuracy, cross_entropy, same, train, weights

RARE = {**RICH, "checkpoint_seconds": 1e9}  # nothing is written by the clock


def signalled(number: int, at: int) -> Any:
    """An objective during whose so-manieth call a signal comes."""
    calls = 0

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        if calls == at:
            signal.raise_signal(number)
        return cross_entropy(model, images, targets)

    return objective


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(rich_model(), folder, **RARE)
    return folder


def resumed_like(whole: Path, folder: Path) -> None:
    train(rich_model(), folder, resume=True, **RARE)
    for name in ("last", "best"):
        assert same(weights(linvit.load(folder / name)), weights(linvit.load(whole / name)))
    told = [[(r["step"], r["top1"]) for r in read_log(run) if r["kind"] == "eval"] for run in (whole, folder)]
    assert told[0] == told[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_step_is_finished_and_kept(number: int, whole: Path, tmp_path: Path) -> None:
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, before)  # nohup ignores SIGHUP
    with pytest.raises(Stopped) as stopped:
        train(rich_model(), tmp_path, objective=signalled(number, 9), **RARE)  # two calls a step: in the fifth
    assert stopped.value.number == number and resumes_after(tmp_path) == 5
    assert signal.getsignal(number) is before
    resumed_like(whole, tmp_path)


def test_an_evaluation_is_left_and_done_anew(whole: Path, tmp_path: Path) -> None:
    calls = 0

    def metrics(model: nn.Module) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("it went on")
        return accuracy(model)

    with pytest.raises(Stopped):
        train(rich_model(), tmp_path, evaluate=metrics, **RARE)
    assert resumes_after(tmp_path) is not None
    resumed_like(whole, tmp_path)


def test_a_second_time_does_not_wait(tmp_path: Path) -> None:
    def impatient(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    with pytest.raises(Stopped):
        train(rich_model(), tmp_path, objective=impatient, **RARE)
    assert resumes_after(tmp_path) is None


def test_handlers_of_others_are_left(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        train(rich_model(), tmp_path, objective=signalled(signal.SIGTERM, 5), **RARE)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_what_watch_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two lines of the log where the run is; and what the loss is when a stage begins."""
    monkeypatch.setattr("linvit.training.engine.loop.TICK", 0.0)
    stages = (Stage("align", "alignment", epochs=1), Stage("tune", epochs=2))
    records: list[dict[str, Any]] = []
    train(stages=stages, watch=records.append, log_steps=3, evaluate=None)
    steps = [record["step"] for record in records if record["kind"] in ("step", "train")]
    assert steps == list(range(1, 13))  # four steps an epoch
    told = [record for record in records if record["kind"] == "step"]
    assert all(r["loss"] > 0 and r["steps"] == 12 and r["epochs"] == 3 and r["seconds_left"] > 0 for r in told)
    assert {record["stage"] for record in told} == {"align", "tune"}
    notes = [record["text"] for record in records if record["kind"] == "note"]
    assert notes[0] == "stage 1 of 2, align: the loss is how far converted layers are from their originals"
    assert notes[1].startswith("stage 2 of 2, tune: the loss is that of the model's answers")
    assert notes[1].endswith("it is not to be compared with that of align")
