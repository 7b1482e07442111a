"""The demo's photograph on a small scale; `make demo` runs it in full."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_sample_image

SCRIPT = Path(__file__).parent.parent / "scripts" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    for name, value in {"SIZES": (32, 64), "ROUNDS": 2, "SECONDS": 0.0, "FOLDER": tmp_path}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_photograph_is_cropped_and_normalised(demo: ModuleType) -> None:
    image = demo.prepare(load_sample_image("china.jpg"), 64)
    assert image.shape == (1, 3, 64, 64) and image.dtype == torch.float32
    assert -3 < image.min() < 0 < image.max() < 3


def test_table_and_picture(demo: ModuleType, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    out = Console(record=True, width=100)
    try:
        demo.photograph(out)
    finally:
        torch.set_num_threads(threads)
    text = out.export_text()
    assert "plan stella: 12 of 12 layers changed" in text and "it says nothing about accuracy" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if line[:3].strip() in ("32", "64")]
    assert [row[:3] for row in rows] == [
        [str(size), model, str((size // 16) ** 2 + 1)] for size in (32, 64) for model in ("softmax", "stella", "mixa")
    ]
    assert all(float(row[-1]) < 1e-5 for row in rows)
    assert [row[-2] for row in rows if row[1] == "softmax"] == ["1.000", "1.000"]
    assert (tmp_path / "photograph.png").read_bytes().startswith(b"\x89PNG")
