"""Run the command line in this process and see what a user sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from linvit.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def linvit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*args: str) -> Outcome:
        with pytest.raises(SystemExit) as stop:
            main(args)
        captured = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on digits."""
    from tests.cli.training import DEIT, MODEL

    folder = tmp_path_factory.mktemp("teacher")
    with pytest.raises(SystemExit) as stop:
        main(["train", *MODEL, "--data=digits", *DEIT, "-o", str(folder), "--json"])
    assert not stop.value.code
    return folder
