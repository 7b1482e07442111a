"""`linvit theory`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome

FEW = ("theory", "--samples", "20000")


def test_table_and_plot(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    plot = tmp_path / "theory.png"
    outcome = linvit(*FEW, "--plot", str(plot))
    assert outcome.code == 0 and plot.stat().st_size > 10_000
    assert max(len(line) for line in outcome.out.splitlines()) <= 100
    for words in ("theorem 5.1", "theorem 5.2", "theorem 5.3", "SteLLA", "Castling", "Kronecker", "as printed (wrong)"):
        assert words in outcome.out
    assert "54 of 54 closed forms lie inside their interval" in outcome.out


def test_json(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit(*FEW, "--seed", "1", "--json")
    assert outcome.code == 0 and outcome.err == ""
    found = outcome.json
    assert (found["samples"], found["seed"], found["confidence"]) == (20000, 1, 0.95)
    assert {row["topic"] for row in found["findings"]} == set(found["topics"])
    wrong = [row for row in found["findings"] if row["wrong"]]
    assert wrong and not any(row["inside"] for row in wrong)
    for row in found["findings"]:
        assert row["low"] <= row["measured"] <= row["high"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--samples", "5"], "error: 5 samples are too few for the intervals to mean anything; take at least 10000\n"),
        (["--plot", "theory.pgn"], "error: unknown picture format '.pgn'; did you mean .png or .svg or .pdf?\n"),
        (["--plot", "nowhere/a.png"], "error: no folder nowhere to put a.png in; make it first\n"),
    ],
)
def test_mistakes_are_one_line(linvit: Callable[..., Outcome], options: list[str], message: str) -> None:
    outcome = linvit("theory", *options)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", message)


def test_a_file_that_cannot_be_written_is_one_line(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    taken = tmp_path / "folder.png"
    taken.mkdir()
    outcome = linvit("theory", "--samples", "10000", "--plot", str(taken))
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"error: {taken}: Is a directory\n")
