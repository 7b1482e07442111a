"""Run the command line in this process and see what a user sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
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
