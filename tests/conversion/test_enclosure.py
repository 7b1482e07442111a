"""A saved folder is loaded from itself alone: no hub, no other file, whatever its config names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import linvit
from linvit.conversion.enclosure import enclosed
from linvit.conversion.opening import open_model
from linvit.errors import LinvitError


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets as far as a socket fails the test."""
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, lambda *args: pytest.fail("a socket was used"))


def saved(folder: Path, model: str, args: dict[str, Any]) -> Path:
    """A folder that looks as linvit.save writes it."""
    small = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=1, num_classes=2)
    linvit.save(small, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model": model, "args": args}))
    return folder


DPT = {"backbone": "somebody/backbone", "use_pretrained_backbone": True, "is_hybrid": False, "backbone_config": None}
HOSTILE = [
    ("transformers:TimmWrapperModel", {"architecture": "resnet18", "model_args": {"checkpoint_path": "FILE"}}),
    ("transformers:TimmWrapperModel", {"architecture": "hf-hub:somebody/model", "num_classes": 2}),
    ("transformers:TimmWrapperModel", {"architecture": "local-dir:FOLDER", "num_classes": 2}),
    ("transformers:DPTForDepthEstimation", DPT),
    ("transformers:DPTForDepthEstimation", {**DPT, "backbone": "resnet18", "use_timm_backbone": True}),
    ("transformers:MaskFormerForInstanceSegmentation", {**DPT, "backbone": "resnet18", "use_timm_backbone": True}),
    ("faster_rcnn", {"backbone": "resnet18", "backbone_args": {"pretrained": True}}),
    ("faster_rcnn", {"backbone": "resnet18", "backbone_args": {"checkpoint_path": "FILE"}}),
    ("faster_rcnn", {"backbone": "hf-hub:somebody/model"}),
    ("faster_rcnn", {"backbone": "local-dir:FOLDER"}),
    ("vit_tiny_patch16_224", {"pretrained_cfg_overlay": {"file": "FILE"}}),
]


@pytest.mark.parametrize(("model", "args"), HOSTILE)
def test_a_config_reaches_for_nothing(model: str, args: dict[str, Any], tmp_path: Path) -> None:
    if model.startswith("transformers:"):
        pytest.importorskip("transformers")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architecture": "resnet18", "model_type": "dinov2"}))
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "weights.pth")
    text = json.dumps(args).replace("FILE", str(tmp_path / "weights.pth")).replace("FOLDER", str(other))
    folder = saved(tmp_path / "saved", model, json.loads(text))
    began = time.monotonic()
    for read in (linvit.load, lambda path: open_model(str(path))):
        with pytest.raises(
            LinvitError, match=r"a saved model is built from its folder alone|asks for other weights than its own"
        ):
            read(folder)
    assert time.monotonic() - began < 20, "nobody waited for a hub"


def test_what_is_refused_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for reach, target in (
        (lambda: (tmp_path / "file").read_text(), f"the file {tmp_path / 'file'}"),
        (lambda: os.open(tmp_path / "file", os.O_RDONLY), f"the file {tmp_path / 'file'}"),
        (lambda: socket.create_connection(("localhost", 1)), "the network"),
        (lambda: subprocess.run(["true"], check=False), "another program"),
    ):
        said = f"^a model reaches for {target}: a saved model is built from its folder"
        with pytest.raises(LinvitError, match=said), enclosed("a model"):
            try:
                reach()
            except Exception as error:  # as libraries do that try the next way
                raise OSError("cannot find it") from error
    assert (tmp_path / "file").read_text() == "x"


def test_other_threads_are_free_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found: list[str] = []
    with enclosed("a model"):
        thread = threading.Thread(target=lambda: found.append((tmp_path / "file").read_text()))
        thread.start()
        thread.join()
        import this  # noqa: F401  # Python's own files are let through

        Path("/proc/self/stat").read_text()
    assert found == ["x"]
