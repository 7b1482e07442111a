"""What a resumed run finds of the best weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.test_checkpoints import RICH, interrupted, rich_model
from tests.training.toys import train


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_lost_best_weights_are_told_about(damage: str, tmp_path: Path) -> None:
    interrupted(tmp_path)
    best = tmp_path / "checkpoints" / "best.safetensors"
    if damage == "cut":
        best.write_bytes(best.read_bytes()[:-100])
    else:
        best.unlink()
    records: list[dict[str, Any]] = []
    train(rich_model(), tmp_path, resume=True, watch=records.append, **RICH)
    notes = [record["text"] for record in records if record["kind"] == "note"]
    assert "the best weights are lost, and the best is looked for again from here" in notes[0]
    assert f"{best} is damaged" in notes[0] and "resumed after step" in notes[1]
    assert best.exists() and (tmp_path / "best" / "model.safetensors").exists()
