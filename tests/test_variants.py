"""What changes of a recipe did, from a store with some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts import variants

from linvit.comparison.statistics.reading import read
from linvit.training.config import override
from linvit.training.recipes import recipe
from tests.comparison.synthetic import run, write


def made(folder: Path, seed: int, top1: float, *settings: str) -> None:
    result: dict[str, Any] = run("stella", 8, seed, "distil", 2, top1, {"name": "abcd", "digest": None})
    result["identity"]["config"] = override(recipe("fast"), [*settings, f"seed={seed}", "size=8"]).to_dict()
    result["conversion"] = {**result.get("conversion", {}), "kl": 0.25}
    result["key"] = f"{len(list(folder.glob('runs/*'))):016x}"
    write(folder / "runs" / f"{result['key']}.json", result)


def test_rows_are_of_what_differs(tmp_path: Path) -> None:
    for seed in (0, 1):
        made(tmp_path, seed, 60.0, "epochs=2")
        made(tmp_path, seed, 70.0, "epochs=2", "stages.features.fit=0", "muon_lr=4")
    made(tmp_path, 5, 50.0, "stages.align.epochs=0", "epochs=2")
    text = variants.table(read([tmp_path]).runs, "fast", {0, 1})
    plain, changed = text.splitlines()[2:]
    assert plain.startswith("| `stella` | 2 |  | 2 |") and plain.endswith("| 0.2500 |")
    assert "`muon_lr=4.0 stages.features.fit=0` | 2 |" in changed
    every = variants.table(read([tmp_path]).runs, "fast")
    assert "stages.align.epochs=0 stages.features.epochs=1.053 stages.finetune.epochs=18.947" in every
    assert variants.table(read([tmp_path]).runs, "distil").count("\n") == 1
