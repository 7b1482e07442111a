"""Loggers: what Weights & Biases, faked here, and a function of the user's are told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import linvit
from linvit.errors import LinvitError
from linvit.training.loggers import RunFacts, find_logger, logging_to
from tests.training.toys import SMALL, small_model

QUICK = ["epochs=1", "batch_size=256", "precision=fp32", "randaugment=none", "log_steps=1"]


class FakeWandb(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(begun=[], rows=[], finished=0)

    def init(self, **options: Any) -> FakeWandb:
        self.begun.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    args: dict[str, Any] = {"settings": QUICK, "output": tmp_path / "mine", "device": "cpu", "logger": "wandb"}
    args["model_args"] = {**SMALL, "num_classes": 10}
    trained = linvit.train("vit_tiny_patch16_224", "digits", "deit", pretrained=False, **args)
    assert fake.begun[0]["name"] == "mine" and fake.begun[0]["config"]["batch_size"] == 256
    assert [step for step, values in fake.rows if "train/loss" in values] == list(range(1, trained.steps + 1))
    last = [values for _, values in fake.rows if "eval/top1" in values][-1]
    assert last["eval/top1"] == trained.last["top1"] and fake.finished == 1
    linvit.train("vit_tiny_patch16_224", "digits", "deit", pretrained=False, resume=True, **args)
    assert fake.begun[1]["id"] == fake.begun[0]["id"] and fake.begun[1]["resume"] == "allow"


def test_wandb_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LinvitError, match="wandb is not installed: pip install wandb"):
        find_logger("wandb")


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_logger.py").write_text(
        "heard = []\ndef report(run):\n    heard.append(run.config['recipe'])\n    return heard.append\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    linvit.train(small_model(num_classes=10), "digits", "deit", settings=QUICK, logger="my_logger:report", device="cpu")
    name, *records = sys.modules.pop("my_logger").heard
    assert name == "deit" and {record["kind"] for record in records} == {"train", "eval"}


@pytest.mark.parametrize(
    ("name", "message"),
    [("tensorboard", "unknown logger 'tensorboard'"), ("json:nothing", "cannot be imported"), ("nowhere:x", "nowhere")],
)
def test_mistakes(name: str, message: str) -> None:
    with pytest.raises(LinvitError, match=message):
        linvit.train(small_model(num_classes=10), "digits", "deit", settings=QUICK, logger=name, device="cpu")


def test_a_logger_that_cannot_begin_or_end() -> None:
    """Nobody is logged in: one line before the work. A server that is gone at the end takes no trained model along."""

    def nobody(run: RunFacts) -> Any:
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    with pytest.raises(LinvitError, match="the logger cannot begin: No API key configured"):
        linvit.train(small_model(num_classes=10), "digits", "deit", settings=QUICK, logger=nobody, device="cpu")
    told: list[dict[str, Any]] = []

    def gone() -> None:
        raise OSError("no server")

    def begun(run: RunFacts) -> Any:
        def hear(record: dict[str, Any]) -> None:
            pass

        hear.close = gone  # type: ignore[attr-defined]
        return hear

    with logging_to(begun, RunFacts(None, {}), told.append):
        pass
    assert [record["text"] for record in told] == ["the logger could not be closed: no server"]


def test_a_logger_that_fails_is_left_out() -> None:
    told: list[dict[str, Any]] = []

    def broken(record: dict[str, Any]) -> None:
        raise OSError("no server")

    with logging_to(lambda run: broken, RunFacts(None, {}), told.append) as heard:
        assert heard is not None
        for step in (1, 2):
            heard({"kind": "train", "step": step})
    assert [record["kind"] for record in told] == ["train", "note", "train"]
    assert "the logger failed, and the run goes on without it" in told[1]["text"] and "no server" in told[1]["text"]
