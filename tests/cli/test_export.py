"""`linvit export` and `linvit bench edge`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import linvit
from linvit.cli import main
from linvit.cli.export import print_exported
from linvit.runtimes import Check, Exported
from linvit.runtimes.exporting import find_target
from linvit.runtimes.photographs import photographs
from tests.dense_fixture import write_voc

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


def test_a_segmenter_is_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_voc(tmp_path / "voc", side=64)
    shallow = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)}
    torch.manual_seed(0)
    model = timm.create_model("semantic_fpn", backbone="pvt_v2_b0", backbone_args=shallow, num_classes=6)
    model.pretrained_cfg["crop_mode"] = "squash"  # as a training on squares notes it
    linvit.save(model, tmp_path / "model")
    words = ["export", tmp_path / "model", "--to", "onnx", "--photographs", 1, "--data", data]
    assert run(*words, "--size", "64") == 0
    measured = json.loads((tmp_path / "model" / "model.onnx.json").read_text())["metrics"]
    assert measured["before"]["mIoU"] == pytest.approx(measured["after"]["mIoU"], abs=1e-4)
    assert "mIoU" in capsys.readouterr().out
    assert run(*words, "--size", "64,96") == 2 and "brought to a square" in capsys.readouterr().err


def test_eight_bits_without_a_metric_are_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    check = Check((32, 32), 2, 0.1, 0.05, 1.0)
    done = Exported(Path("a.onnx"), "onnx", "int8", (32, 32), False, 2**20, (check,), {"float32_nodes": 4})
    print_exported(done, find_target("onnx"))
    printed = capsys.readouterr().out
    assert "was not measured: give --data" in printed and "4 operations" in printed and "5.0e-02" in printed


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
