"""The example in CONTRIBUTING.md is a working mechanism: it passes the registry-wide tests like any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from linvit import attention
from linvit.errors import LinvitError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def example(tmp_path: Path) -> dict[str, str]:
    """The example as a module; the environment in which Python finds it."""
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "contributed.py").write_text(source, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_the_example_passes_the_registry_wide_tests(example: dict[str, str]) -> None:
    tests = "tests/attention/test_every_mechanism.py"
    options = ["-q", "-p", "contributed", "-p", "no:cacheprovider", "-k", "relu_squared", tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, env=example, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 25


def python(example: dict[str, str], *args: str, folder: Path | None = None, **environment: str) -> str:
    """What a fresh process prints, which must end well."""
    done = subprocess.run(
        [sys.executable, *args], env={**example, **environment}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_is_listed(example: dict[str, str]) -> None:
    code = "import contributed; from linvit.cli import main; main(['list', 'mechanisms'])"
    listed = python(example, "-c", code)
    assert "relu_squared" in listed and "Your paper" in listed


COMMAND = "from linvit_command import main; main()"
SMALL = [f"--model-arg={arg}" for arg in ("depth=1", "embed_dim=24", "num_heads=2", "img_size=32")]
CONVERT = ["convert", "deit_tiny_patch16_224", "--no-pretrained", *SMALL, "--plan=relu_squared"]


def test_a_named_module_serves_fresh_processes(example: dict[str, str], tmp_path: Path) -> None:
    """The command converts with it from the folder it lies in, `load` reads the model, and a worker of compare has it:
    all of them processes that do not import it themselves."""
    away = {**example, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    python(away, "-c", COMMAND, "--import", "contributed", *CONVERT, "-o", "m", folder=tmp_path)
    script = """
import multiprocessing
import linvit
from linvit.attention import mechanism_class

def ask(_):
    return mechanism_class("relu_squared").paper

if __name__ == "__main__":
    print(linvit.load("m").blocks[0].attn.mechanism.name)
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        print(*pool.map(ask, [0]))
"""
    (tmp_path / "script.py").write_text(script)
    told = python(away, "script.py", folder=tmp_path, LINVIT_MODULES="contributed")
    assert told == "relu_squared\nYour paper\n"


def test_an_installed_package_is_found_by_its_entry_point(example: dict[str, str], tmp_path: Path) -> None:
    """A broken one beside it is a warning, and does not take the others along."""
    about = tmp_path / "yours-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: yours\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[linvit.mechanisms]\nours = contributed\nbroken = no_such_module\n")
    code = "import linvit; print(*linvit.list_mechanisms())"
    assert "relu_squared" in python(example, "-c", code).split()


def test_a_module_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINVIT_MODULES", "no_such_module")
    monkeypatch.setattr(attention, "_complete", False)
    with pytest.raises(
        LinvitError, match="the module no_such_module, which --import or LINVIT_MODULES names, cannot be imported"
    ):
        attention.list_mechanisms()
    monkeypatch.setenv("LINVIT_MODULES", "")
    with pytest.raises(LinvitError, match="one of your own has to be imported, or named by --import or LINVIT_MODULES"):
        attention.create_attention("zzz")
