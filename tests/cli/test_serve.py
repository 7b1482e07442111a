"""`linvit serve` at the terminal: an address, a quiet end, and mistakes in one line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
import timm

from linvit import save
from tests.cli.conftest import Outcome


def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    save(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3), tmp_path / "model")
    command = [sys.executable, "-m", "linvit", "serve", "model", "--plan", "relu_linear", "--port", "0", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    try:
        address = json.loads("".join(process.stdout.readline() for _ in range(3)))["address"]
        assert address.startswith("http://127.0.0.1:")
        with urlopen(f"{address}api/choices", timeout=20) as answer:
            told = json.load(answer)
        assert told["models"] == ["model"] and [side["plan"] for side in told["sides"]] == ["relu_linear", "stella"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_taken_port_is_told_before_models_are_opened(linvit: Callable[..., Outcome]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        outcome = linvit("serve", "no_such_model", "--port", str(taken.getsockname()[1]))
    assert outcome.code == 2 and "give another --port" in outcome.err and "Traceback" not in outcome.err


def test_a_missing_extra_is_one_line(linvit: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("linvit.page")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    outcome = linvit("serve", "--port", "0")
    assert outcome.code == 2 and "pip install linvit[serve]" in outcome.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no_such_model"], "unknown model"),
        (["--no-pretrained", "--plan", "auto"], "let linvit plan write it"),
        (["--no-pretrained", "--plan", "nonsense"], "unknown plan"),
        (["--no-pretrained", "--size", "225"], "is shown at"),
        (["resnet18", "--no-pretrained"], "no attention"),
    ],
)
def test_mistakes_are_one_line(linvit: Callable[..., Outcome], args: list[str], message: str) -> None:
    outcome = linvit("serve", "--port", "0", *args)
    assert outcome.code == 2 and message in outcome.err.splitlines()[-1]
