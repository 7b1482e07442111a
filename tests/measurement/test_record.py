"""Where a result says that its code comes from, which machine it ran on, and when its rows are written."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from linvit.measurement import record

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def repository(folder: Path, *files: str) -> str:
    """A repository with these files; its commit."""

    def git(*args: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", "-C", folder, *who, *args], check=True, capture_output=True, text=True).stdout

    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("x = 1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    return git("rev-parse", "HEAD").strip()


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LINVIT_COMMIT", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)


def test_the_commit_is_that_of_our_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = repository(tmp_path, "src/linvit/__init__.py")
    monkeypatch.setattr(record, "PACKAGE", tmp_path.resolve() / "src" / "linvit")
    assert record.commit() == commit
    (tmp_path / "src" / "linvit" / "__init__.py").write_text("x = 2\n")
    assert record.commit() == f"{commit}+"


@pytest.mark.parametrize("place", [".venv/lib/python3.11/site-packages/linvit", "vendor/linvit", "src/linvit"])
def test_a_project_around_us_is_not_ours(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, "main.py", "vendor/linvit/__init__.py")
    package = tmp_path.resolve() / place
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(record, "PACKAGE", package)
    assert record.commit() is None


def test_what_pip_installed_from_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, told = tmp_path / "linvit", tmp_path / "linvit-1.dist-info"
    for folder in (package, told):
        folder.mkdir()
    (told / "direct_url.json").write_text(json.dumps({"url": "x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}))
    found: Distribution = PathDistribution(told)
    monkeypatch.setattr(record, "distribution", lambda name: found)
    monkeypatch.setattr(record, "PACKAGE", package.resolve())
    assert record.commit() == "abc"
    monkeypatch.setattr(record, "PACKAGE", tmp_path / "other" / "linvit")
    assert record.commit() is None


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 26, model 2)"),
        ("cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon Gold 6248\n", "Xeon Gold 6248"),
        ("BogoMIPS\t: 48.00\n", platform.machine()),
    ],
)
def test_a_processor_without_a_number_is_told_by_its_family(
    told: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PROCESSORS", tmp_path / "cpuinfo")
    record.PROCESSORS.write_text(f"processor\t: 0\n{told}\nprocessor\t: 1\n{told}")
    assert record.cpu() == f"{name}, {os.cpu_count()} cores"


def test_rows_that_come_together_are_on_disk_together(tmp_path: Path) -> None:
    file = record.ResultFile(tmp_path / "a.json", {"kind": "bench edge"}, record.environment("cpu"))
    for place in range(3):
        file.add({"place": place})
    assert [row["place"] for row in record.read_result(tmp_path / "a.json")["rows"]] == [0, 1, 2]
