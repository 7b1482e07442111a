"""The example in CONTRIBUTING.md is a working mechanism: it passes the registry-wide tests like any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_example_is_listed(example: dict[str, str]) -> None:
    code = "import contributed; from linvit.cli import main; main(['list', 'mechanisms'])"
    done = subprocess.run([sys.executable, "-c", code], env=example, capture_output=True, text=True, check=True)
    assert "relu_squared" in done.stdout and "Your paper" in done.stdout
