"""Runs the other files of this folder under Triton's interpreter, in a process of their own; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER)]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
