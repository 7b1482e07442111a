"""`linvit export` and `linvit bench edge`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import linvit
from linvit.cli import main
from linvit.runtimes.photographs import photographs

pytest.importorskip("onnx", reason="pip install 'linvit[onnx]'")
pytest.importorskip("onnxruntime", reason="pip install 'linvit[onnx]'")
SMALL = [f"--model-arg={text}" for text in ("depth=1", "embed_dim=24", "num_heads=2", "patch_size=8", "num_classes=2")]


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


def test_export_with_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, picture in enumerate(photographs(6)):
        folder = tmp_path / "data" / ("ab"[place % 2])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{place}.png")
    model = ["vit_tiny_patch16_224", "--no-pretrained", "--model-arg=img_size=32", *SMALL]
    path = tmp_path / "model.onnx"
    assert run("export", *model, "--to", "onnx", "-o", path, "--data", tmp_path / "data", "--photographs", 2) == 0
    printed = capsys.readouterr().out
    assert "ONNX in fp32, 32×32 pixels" in printed and "top-1" in printed and "relative (RMS)" in printed
    beside = json.loads(Path(f"{path}.json").read_text())
    assert beside["metrics"]["before"]["top1"] == beside["metrics"]["after"]["top1"]
    assert run("export", *model, "--to", "coreml", "--dynamic") == 2
    assert "Core ML cannot have dynamic" in capsys.readouterr().err


def test_bench_edge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, plot = tmp_path / "edge.json", tmp_path / "edge.png"
    words = ["--plan", "stella", "--size", "32", "--runtime", "onnx", "--budget", "0.05"]
    assert run("bench", "edge", "vit_tiny_patch16_224", *SMALL, *words, "-o", result, "--plot", plot) == 0
    printed = capsys.readouterr().out
    assert "attention's share" in printed and plot.stat().st_size > 1000  # what it is by eager PyTorch: test_latency
    rows = json.loads(result.read_text())["rows"]
    assert [(row["runtime"], row["attention"]) for row in rows] == [("onnx", "original"), ("onnx", "stella")]
    for row in rows:
        assert row["status"] == "ok" and 0 < row["ms"]["p50"] <= row["ms"]["p90"] and row["error"] < 1e-4
        assert row["peak_bytes"] > 2**20 and row["file_bytes"] > 1000 and row["ratio"] > 0
    assert run("bench", "edge", "--from", result) == 0
    assert run("bench", "edge", "vit_tiny_patch16_224", "--runtime", "tflite") == 2
    assert linvit.__version__ in result.read_text()
