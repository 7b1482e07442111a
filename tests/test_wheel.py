"""The wheel holds all of the package, and runs where nothing else of the repository is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves its scratch files beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True, cwd=folder)
    (built,) = folder.glob("linvit-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder with nothing but what the wheel brings."""
    folder = wheel.parent / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True)
    return folder


def run(installed: Path, *command: str) -> str:
    """A command in the installed package's environment: its own folder, and the dependencies that the tests have.

    `-S` leaves out the .pth files of site-packages, one of which leads to the sources where linvit is installed
    editable; the folders themselves are named in its place.
    """
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *places]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=installed.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_of_the_package_is_missing(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tree = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "linvit").rglob("*") if path.is_file()}
    expected = {"linvit_command.py", *(name for name in tree if "__pycache__" not in name)}
    assert {"linvit/py.typed", "linvit/cli/__init__.py"} <= expected
    assert {Path(name).suffix for name in expected} >= {".toml", ".html", ".css", ".js"}
    assert expected - names == set()
    packed = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packed - expected == set(), "the wheel holds what the sources do not"


def test_the_installed_package_runs(installed: Path) -> None:
    assert "convert" in run(installed, str(installed / "bin" / "linvit"), "--help")
    code = "import linvit, linvit.cli; print(linvit.__file__); linvit.cli.main(['list', 'mechanisms', '--json'])"
    place, _, listed = run(installed, "-c", code).partition("\n")
    assert place == str(installed / "linvit" / "__init__.py"), "it was not the installed package that ran"
    assert {"softmax", "stella"} <= {row["name"] for row in json.loads(listed)["mechanisms"]}


def test_the_installed_package_converts(installed: Path) -> None:
    model = ["vit_tiny_patch16_224", "--no-pretrained", "--model-arg", "depth=2"]
    run(installed, "-m", "linvit", "convert", *model, "--plan", "stella", "-o", "converted")
    saved = {path.name for path in (installed.parent / "converted").iterdir()}
    assert saved == {"config.json", "model.safetensors"}
