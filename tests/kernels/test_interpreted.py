"""Runs the other files of this folder under Triton's interpreter, each in a process of its own; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
COMPILED = ("test_machine_code.py",)
FILES = sorted(p.name for p in FOLDER.glob("test_*.py") if p != Path(__file__) and p.name not in COMPILED)


@pytest.mark.parametrize("name", FILES)
def test_under_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
