"""The folders are layers: nothing is imported upwards, so that a newcomer can read them from the bottom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "linvit"
LAYERS = (
    "cli",
    "page",
    "comparison",
    "tasks",
    "training",
    "runtimes",
    "figures",
    "measurement",
    "models",
    "conversion",
    "attention",
    "kernels",
)
GROUND = {"clock", "codec", "errors", "files", "images", "version"}  # single files that every room may use
ROOMS_OF_COMPARISON = ("reporting", "statistics", "scheduling", "description")
ENTRIES = {"__init__.py", "__main__.py", "starting.py"}  # the package's own doors, which look at the rooms


def imported(file: Path, package: str = "linvit") -> set[str]:
    """What of a package a file imports, also inside functions: the folders and files in it, and the package's own name
    where that is asked for something, as by `import linvit` or `from linvit import convert`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            module = node.module or ""
            names += [f"{module}.{alias.name}" for alias in node.names] if module == package else [module]
        elif isinstance(node, ast.Import):  # without `as`, the name that is bound is the outermost package's
            names += [alias.name if alias.asname else alias.name.split(".")[0] for alias in node.names]
    folder = SOURCE.joinpath(*package.split(".")[1:])
    members = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    inner = [name.removeprefix(f"{package}.").split(".")[0] for name in names if f"{name}.".startswith(f"{package}.")]
    return {name if name in members else package for name in inner}


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(LAYERS)
    assert {path.stem for path in SOURCE.glob("*.py") if path.name not in ENTRIES} == GROUND


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_imported_upwards(layer: str) -> None:
    above = {"linvit", *LAYERS[: LAYERS.index(layer)]}
    for file in (SOURCE / layer).rglob("*.py"):
        assert not imported(file) & above, f"{file.name} imports {sorted(imported(file) & above)}"


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_ground_floor_knows_no_room(name: str) -> None:
    assert imported(SOURCE / f"{name}.py") <= GROUND


@pytest.mark.parametrize("room", ROOMS_OF_COMPARISON)
def test_nothing_is_imported_upwards_within_comparison(room: str) -> None:
    folder = SOURCE / "comparison" / room
    assert folder.is_dir(), f"comparison has no folder {room}"
    above = {"linvit.comparison", *ROOMS_OF_COMPARISON[: ROOMS_OF_COMPARISON.index(room)]}
    for file in folder.rglob("*.py"):
        found = imported(file, "linvit.comparison") & above
        assert not found, f"{file.name} imports {sorted(found)}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import linvit", {"linvit"}),
        ("def f():\n    from linvit import convert", {"linvit"}),
        ("from linvit import codec, convert", {"codec", "linvit"}),
        ("import linvit.conversion", {"linvit"}),
        ("import linvit.conversion as c", {"conversion"}),
        ("from linvit.conversion.plan import Plan", {"conversion"}),
        ("from linvit.errors import LinvitError\nimport torch", {"errors"}),
        ("import linvitation", set()),
    ],
)
def test_an_import_is_seen(line: str, found: set[str], tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(line)
    assert imported(tmp_path / "file.py") == found
