"""The folders are layers: nothing is imported upwards, so that a newcomer can read them from the bottom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "linvit"
LAYERS = (
    "cli",
    "comparison",
    "tasks",
    "training",
    "figures",
    "measurement",
    "models",
    "conversion",
    "attention",
    "kernels",
)


def imported(file: Path) -> set[str]:
    """The folders of linvit that a file imports from, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("linvit.")} & set(LAYERS)


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_imported_upwards(layer: str) -> None:
    above = set(LAYERS[: LAYERS.index(layer)])
    for file in (SOURCE / layer).rglob("*.py"):
        assert not imported(file) & above, f"{file.name} imports {sorted(imported(file) & above)}"
