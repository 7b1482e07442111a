"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome
from tests.training.test_masks import castled
from tests.training.toys import train


def test_show_masks(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    train(castled(), tmp_path / "run", epochs=1)
    outcome = linvit("show", "masks", str(tmp_path / "run"), "-o", str(tmp_path / "masks.png"), "--json")
    assert outcome.code == 0 and outcome.json["steps"] == 4
    assert (tmp_path / "masks.png").stat().st_size > 1000
    assert "blocks.1.attn" in linvit("show", "masks", str(tmp_path / "run")).out
    assert (tmp_path / "run" / "masks.png").exists()


@pytest.mark.parametrize("what", ["missing", "no masks", "bad picture"])
def test_show_masks_mistakes(linvit: Callable[..., Outcome], tmp_path: Path, what: str) -> None:
    args = ["show", "masks", str(tmp_path)]
    if what != "missing":
        (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1}\n')
    if what == "bad picture":
        args += ["-o", str(tmp_path / "x.gif")]
    outcome = linvit(*args)
    words = {"missing": "holds no log.jsonl", "no masks": "logged no masks", "bad picture": "unknown picture format"}
    assert outcome.code == 2 and outcome.err.startswith("error:") and words[what] in outcome.err
    assert outcome.err.count("\n") == 1
