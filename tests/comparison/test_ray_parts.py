"""What the Ray engine is made of, without a cluster: what travels to a node and back, and what a node must have."""

from __future__ import annotations

import ast
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from linvit.comparison.scheduling.places.ray import OneVoice, RayCluster
from linvit.comparison.scheduling.places.ray_worker import (
    absolute,
    keep_only,
    mirrored,
    misfit,
    own_source,
    read_files,
    write_files,
)
from linvit.comparison.scheduling.scheduler import run
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from tests.comparison.jobs import make_job

ROOT = Path(__file__).parents[2]


def test_what_a_node_must_have(tmp_path: Path) -> None:
    ours = own_source()
    assert misfit(ours, {"data": "digits"}) is None and misfit(ours, {"data": str(tmp_path)}) is None
    photos = misfit(ours, {"data": "/no/such/photos"})
    assert photos == "has no /no/such/photos: put the data in the same place on every node"
    assert "has no /no/root" in (misfit(ours, {"data": "torch/cifar10", "root": "/no/root"}) or "")


def test_places_are_absolute_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "digits", "root/photos", "teacher"):
        Path(name).mkdir(parents=True)
    assert absolute({"data": "digits"}) == {"data": "digits"}
    assert absolute({"data": "photos"}) == {"data": str(tmp_path / "photos")}
    rooted = {"data": str(tmp_path / "root" / "photos"), "root": str(tmp_path / "root")}
    assert absolute({"data": "photos", "root": "root"}) == rooted
    assert absolute({"data": "torch/x", "root": "root"}) == {"data": "torch/x", "root": str(tmp_path / "root")}
    taught = {"data": "digits", "teacher": "teacher"}
    assert absolute(taught)["teacher"] == str(tmp_path / "teacher")
    assert absolute({**taught, "teacher": "deit_tiny_patch16_224"})["teacher"] == "deit_tiny_patch16_224"


def test_checkpoints_are_mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linvit.comparison.scheduling.places.ray_worker.EVERY", 0.05)
    there, here = tmp_path / "there", tmp_path / "here"
    write_files(there, {"log.jsonl": b"a", "checkpoints/step-1.safetensors": b"1"})
    write_files(here, read_files(there))
    events: list[dict[str, Any]] = []
    with mirrored(there, events.append):
        (there / "log.jsonl").write_bytes(b"ab")
        time.sleep(0.2)
        assert not events, "a log without a checkpoint is not worth sending"
        (there / "checkpoints" / ".half").write_bytes(b"x")
        (there / "checkpoints" / "step-1.safetensors").unlink()
        write_files(there, {"checkpoints/step-2.safetensors": b"2"})
        until = time.monotonic() + 5
        while not events and time.monotonic() < until:
            time.sleep(0.05)
    (event,) = events
    assert set(event["files"]) == {"log.jsonl", "checkpoints/step-2.safetensors"}
    write_files(here, event["files"])
    keep_only(here, event["names"])
    assert read_files(here) == {"log.jsonl": b"ab", "checkpoints/step-2.safetensors": b"2"}


def test_stdout_is_for_results(capsys: pytest.CaptureFixture[str]) -> None:
    with redirect_stdout(OneVoice(sys.stdout)):  # type: ignore[type-var]
        other = threading.Thread(target=print, args=("a worker died",))
        other.start()
        other.join()
        print("result")
    assert capsys.readouterr().out == "result\n"


def test_without_ray_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LinvitError, match=r"pip install 'linvit\[ray\]'") as caught:
        run([make_job(0)], Store(tmp_path), RayCluster(), watch=lambda job, record: None)
    assert "\n" not in str(caught.value)


def test_importing_linvit_does_not_import_ray() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert "ray" not in {name.partition(".")[0] for name in names}, file
