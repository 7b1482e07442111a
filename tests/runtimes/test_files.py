"""The files of `linvit.export`: whole or not there, of any size, and measured as they are written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit.conversion.convert import own_size
from linvit.errors import LinvitError
from linvit.models.labels import known_class_names
from linvit.runtimes import verifying
from linvit.runtimes.exporting import other_sizes
from tests.runtimes.test_exporting import small

pytest.importorskip("onnx", reason="pip install 'linvit[onnx]'")
pytest.importorskip("onnxruntime", reason="pip install 'linvit[onnx]'")


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_weights_that_one_file_cannot_hold(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linvit.runtimes.onnx.LARGEST", 0)
    calibrate = None
    if precision == "int8":
        from matplotlib import get_data_path

        calibrate = Path(get_data_path(), "sample_data")
    path = tmp_path / "a folder" / "model.onnx"
    done = linvit.export(small("stella", depth=1), "onnx", path, precision=precision, calibrate=calibrate, count=1)
    names = {found.name for found in path.parent.iterdir()}
    assert names == {"model.onnx", "model.onnx.data", "model.onnx.json"}
    assert done.bytes == sum((path.parent / name).stat().st_size for name in names - {"model.onnx.json"})


def test_a_distilled_backbone_of_any_size_in_openvino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One photograph is traced as a batch; the second size is not square, small as the model is."""
    pytest.importorskip("openvino", reason="pip install 'linvit[openvino]'")
    monkeypatch.setattr("linvit.runtimes.onnx.LARGEST", 0)
    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("deit_tiny_distilled_patch16_224", **sizes)
    done = linvit.export(model.half(), "openvino", tmp_path / "model.xml", dynamic=True, count=1)
    assert [(check.size, check.agreement) for check in done.checks] == [((32, 32), None), ((48, 32), None)]
    assert {path.name for path in tmp_path.iterdir()} == {"model.xml", "model.bin", "model.xml.json"}
    assert next(model.parameters()).dtype == torch.float16 and model.training


def test_a_pyramid_is_measured_at_the_size_of_its_file(tmp_path: Path) -> None:
    shallow = {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64), "in_chans": 1}
    model = timm.create_model("pvt_v2_b0", num_classes=1000, **shallow)

    def measure(one: nn.Module) -> dict[str, float]:
        return dict(zip(("height", "width"), own_size(one), strict=True))

    done = linvit.export(model, "onnx", tmp_path / "model.onnx", size=(64, 96), measure=measure, count=1)
    assert done.metrics == {"before": {"height": 64, "width": 96}, "after": {"height": 64, "width": 96}}
    beside = json.loads((tmp_path / "model.onnx.json").read_text())
    assert beside["classes"][0].startswith("tench") and len(beside["preprocessing"]["mean"]) == 1
    assert own_size(model) == (224, 224) and known_class_names(timm.create_model("test_vit", num_classes=0)) == ()


@pytest.mark.parametrize("size", [(32, 32), (224, 224), (128, 224), (224, 128), (64, 320)])
@pytest.mark.parametrize("patch", [4, 14, 16])
def test_the_other_sizes_are_not_square(size: tuple[int, int], patch: int) -> None:
    model = SimpleNamespace(patch_embed=SimpleNamespace(patch_size=(patch, patch)))
    for height, width in other_sizes(model, size):
        assert height != width and (height, width) != size
        assert height % (patch if patch > 4 else 32) == 0 == width % (patch if patch > 4 else 32)


def test_eight_bits_that_give_nan_do_not_pass() -> None:
    check = verifying.compare([torch.ones(1, 3)], [torch.tensor([[1.0, float("nan"), 1.0]])], (32, 32))
    assert not check.relative <= verifying.TOLERANCES["int8"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calibrate": "photos"}, "only int8 is calibrated"),
        ({"count": 0}, "give one at least"),
        ({"path": "folder.onnx"}, "folder.onnx is a folder"),
        ({"size": 96}, "takes no images of 96×96 pixels .*: build it for that size"),
        ({"dynamic": True}, "takes no images of .*: leave --dynamic out"),
    ],
)
def test_what_cannot_be_done_is_said_first(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.onnx").mkdir()
    with pytest.raises(LinvitError, match=message):
        linvit.export(timm.create_model("efficientformerv2_s0"), **given)


def test_photographs_have_one_channel_or_three() -> None:
    with pytest.raises(LinvitError, match="takes 4 channels"):
        linvit.export(timm.create_model("test_vit", in_chans=4))
