"""Runs the other files of this folder under Triton's interpreter, in processes of their own; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
COMPILED = ("test_machine_code.py",)
FILES = {p.name for p in FOLDER.glob("test_*.py") if p != Path(__file__) and p.name not in COMPILED}
LONG = ("test_linear.py", "test_relu_quadratic.py")  # a process each; the others share one, and its start


@pytest.mark.parametrize("names", [*((name,) for name in LONG), sorted(FILES - {*LONG})], ids=[*LONG, "others"])
def test_under_the_interpreter(names: list[str]) -> None:
    files = [str(FOLDER / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
