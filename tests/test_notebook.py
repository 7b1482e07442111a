"""The notebook runs top to bottom, and what it says comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "first-steps.ipynb"


def test_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "clear its outputs"
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["original"].last["top1"] > 80
    assert names["before"].top1 < names["after"].top1 and names["after"].agreement > 85
    assert names["same"] and set(names["speedups"]) == {224, 448, 672}
