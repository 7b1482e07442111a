"""`linvit.export`: files that equal the model, those that do not and are refused, and what cannot be had."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.models.efficientformer_v2 import Attention2d
from torch import nn

import linvit
from linvit.conversion import parse_plan
from linvit.errors import LinvitError
from linvit.runtimes import Exported, folding, target, verifying
from linvit.runtimes.coreml import check_structure
from linvit.runtimes.exporting import picture_settings
from linvit.runtimes.folding import fold
from linvit.runtimes.opened import prepare
from linvit.runtimes.photographs import photographs
from linvit.runtimes.preparing import resampled_positions
from linvit.runtimes.process import Process
from linvit.runtimes.verifying import prepared

onnx = pytest.importorskip("onnx", reason="pip install 'linvit[onnx]'")
pytest.importorskip("onnxruntime", reason="pip install 'linvit[onnx]'")


def small(plan: str = "mixa", **args: object) -> nn.Module:
    """A ViT of two layers, one of them quadratic where the plan has such."""
    torch.manual_seed(0)
    size = {"img_size": 64, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **{**size, **args})
    for weight in (p for p in model.parameters() if p.ndim == 2):
        nn.init.normal_(weight, std=0.2)  # at timm's 0.02 attention would add next to nothing
    linvit.convert(model, parse_plan(plan, **({"keep": 1} if plan == "mixa" else {})))
    return model.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Exported]:
    model = small()
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": tuple("abcde")}
    return model, linvit.export(model, "onnx", tmp_path_factory.mktemp("onnx") / "model.onnx", count=3)


def test_what_is_told_and_written_beside(exported: tuple[nn.Module, Exported]) -> None:
    _, done = exported
    (check,) = done.checks
    assert check.images == 3 and check.agreement == 1.0 and 0 < check.relative < 1e-5
    beside = json.loads(Path(f"{done.path}.json").read_text())
    assert beside["classes"] == list("abcde") and beside["size"] == [64, 64]
    assert beside["preprocessing"]["mean"] == [0.5, 0.5, 0.5] and beside["checks"][0]["relative"] == check.relative
    assert done.bytes == done.path.stat().st_size


def test_the_file_holds_plain_operations_only(exported: tuple[nn.Module, Exported]) -> None:
    graph = onnx.load(exported[1].path).graph
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    assert [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim] == [1, 3, 64, 64]


def test_any_size_and_batch(tmp_path: Path) -> None:
    model = small("relu_linear")
    done = linvit.export(model, "onnx", tmp_path / "any.onnx", dynamic=True, count=2)
    own, second = done.checks
    assert own.size == (64, 64) and second.size[0] != second.size[1] and second.relative < 1e-5
    again = small("relu_linear", dynamic_img_size=True)
    again.load_state_dict(model.state_dict())
    images = torch.randn(3, 3, 40, 96)
    with Process(done.path) as process, torch.no_grad():
        (found,) = process.run(images.numpy())
        np.testing.assert_allclose(found, again(images), rtol=1e-3, atol=1e-5)


def test_a_weight_that_changed_is_found_and_its_layer_named(exported: tuple[nn.Module, Exported]) -> None:
    model, done = exported
    changed = onnx.load(done.path)
    inside = {
        n.output[0]: n for n in changed.graph.node if n.op_type == "MatMul" and scope_of(n).startswith("blocks.1")
    }
    names = {name for node in inside.values() for name in node.input}
    weight = next(value for value in changed.graph.initializer if value.name in names)
    values = onnx.numpy_helper.to_array(weight).copy()
    values *= 1.5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    path = done.path.with_name("changed.onnx")
    onnx.save(changed, path)
    beside = json.loads(Path(f"{done.path}.json").read_text())
    Path(f"{path}.json").write_text(json.dumps(beside))
    look = verifying.layers_inside(path, nodes_of(model))
    with pytest.raises(LinvitError, match=r"departs from the model by .* first in blocks\.1"):
        verifying.verify(model, path, photographs(2), picture_settings(model), (64, 64), "fp32", look)
    nameless = verifying.layers_inside(path, {})  # of a model that is one layer
    with pytest.raises(LinvitError, match=r"departs from the model by .* behind the last layer"):
        verifying.verify(model, path, photographs(2), picture_settings(model), (64, 64), "fp32", nameless)


def scope_of(node: onnx.NodeProto) -> str:
    scopes = [p.value for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"]
    return next((s for s in eval(scopes[0]) if s.count(".") == 1), "") if scopes else ""


def nodes_of(model: nn.Module) -> dict[str, str]:
    from linvit.runtimes import preparing

    image = torch.randn(1, 3, 64, 64)
    made = preparing.exported_twin(preparing.standing_twin(model, None, False), image, dynamic=False, precision="fp32")
    return preparing.layer_nodes(preparing.trace(made, image, dynamic=False), preparing.layer_names(made))


def test_wrong_preprocessing_is_found(exported: tuple[nn.Module, Exported]) -> None:
    model, done = exported
    beside = Path(f"{done.path}.json")
    right = beside.read_text()
    wrong = json.loads(right)
    wrong["preprocessing"]["mean"] = [0.485, 0.456, 0.406]
    beside.write_text(json.dumps(wrong))
    try:
        with pytest.raises(LinvitError, match="preprocessing beside it is not the model's"):
            verifying.verify(model, done.path, photographs(2), picture_settings(model), (64, 64), "fp32", lambda _: {})
    finally:
        beside.write_text(right)


def test_an_export_that_departs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: nn.Module, images: torch.Tensor, **how: bool) -> None:
        fold(model, images, **how)
        model.blocks[0].mlp.fc1.weight.data *= 1.1

    monkeypatch.setattr("linvit.runtimes.preparing.fold", spoil)
    with pytest.raises(LinvitError, match=r"first in blocks\.0\.mlp"):
        linvit.export(small(), "onnx", tmp_path / "model.onnx", count=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
@pytest.mark.parametrize("how", [{}, {"crop_mode": "squash"}, {"crop_pct": 1.0, "interpolation": "bilinear"}])
def test_pictures_are_prepared_as_timm_does(size: tuple[int, int], how: dict[str, object]) -> None:
    settings = {**picture_settings(small()), **how}
    pictures = photographs(3)
    wanted = prepared(small(), pictures, settings, size)
    for picture, expected in zip(pictures, wanted, strict=True):
        np.testing.assert_allclose(prepare(picture, settings, size), expected, atol=1e-6)


@pytest.mark.parametrize("width", [32, 96])  # less and more than the 65 tokens
def test_folding_changes_nothing(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "FEWEST_QUERIES", 30)  # of 65: blocks of queries, the last one short
    monkeypatch.setattr(folding, "MAP_BYTES", 0)
    joined = {"stella": [0, 1], "mixa": [1], "relu_linear": [0, 1], "softmax": []}
    joined["stella:centre=true"] = []
    for plan, layers in joined.items():
        model, images = small(plan, embed_dim=width, num_heads=width // 16), torch.randn(2, 3, 64, 64)
        for vector in (p for p in model.parameters() if p.ndim == 1):
            nn.init.normal_(vector, 0.5, std=0.2)
        with torch.no_grad():
            wanted = model(images)
            fold(model, images, scales=True)
            torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)
        assert model.blocks[0].attn.qkv is None
        assert [i for i, block in enumerate(model.blocks) if hasattr(block.attn, "heads_out")] == layers


def test_folding_windows_with_a_bias_changes_nothing() -> None:
    torch.manual_seed(0)
    args = {"img_size": 32, "patch_size": 2, "window_size": 4, "depths": (2,), "embed_dim": 16, "num_heads": (2,)}
    model = timm.create_model("swin_tiny_patch4_window7_224", **args, num_classes=5).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    linvit.convert(model, "relu_quadratic")
    with torch.no_grad():
        images = torch.randn(2, 3, 32, 32)
        wanted = model(images)
        fold(model, images, scales=True)
        torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)
    assert "forward" in vars(model.layers[0].blocks[1].attn.mechanism)


def test_positions_are_resampled_as_timm_does() -> None:
    from timm.layers import resample_abs_pos_embed

    table = torch.randn(1, 1 + 6 * 6, 4)
    for new in ((6, 6), (4, 9), (12, 5)):
        given = {"new_size": new, "old_size": (6, 6), "num_prefix_tokens": 1}
        torch.testing.assert_close(resampled_positions(table, **given), resample_abs_pos_embed(table, **given))


def test_half_precision_keeps_sums_over_tokens(tmp_path: Path) -> None:
    done = linvit.export(small("stella"), "onnx", tmp_path / "half.onnx", precision="fp16", count=2)
    assert done.checks[0].relative < 2e-2 and done.facts["float32_nodes"] == 4
    graph = onnx.load(done.path).graph
    kinds = {value.name: value.data_type for value in graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds.values()


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_int8_shows_the_metric_before_and_after(to: str, exported: tuple[nn.Module, Exported], tmp_path: Path) -> None:
    for package in ("onnxruntime",) if to == "onnx" else ("openvino", "nncf"):
        pytest.importorskip(package, reason=f"pip install 'linvit[{to}]'")
    from PIL import Image

    for place, picture in enumerate(photographs(8)):
        Image.fromarray(picture).save(tmp_path / f"{place}.png")
    asked: list[float] = []

    def measure(model: nn.Module) -> dict[str, float]:
        out = model(prepared(model, photographs(2), picture_settings(small()), (64, 64)))
        asked.append(float(out.detach().norm()))
        return {"top1": asked[-1]}

    suffix = {"onnx": "onnx", "openvino": "xml"}[to]
    path = tmp_path / f"model.{suffix}"
    done = linvit.export(small(), to, path, precision="int8", calibrate=tmp_path, measure=measure, count=2)
    before, after = done.metrics["before"]["top1"], done.metrics["after"]["top1"]
    assert before != after and after == pytest.approx(before, rel=0.1)
    assert done.facts["float32_nodes"] >= 4 and done.checks[0].relative < 0.2
    whole = exported[1] if to == "onnx" else linvit.export(small(), to, tmp_path / "whole.xml", count=1)
    assert done.bytes < whole.bytes


def test_openvino_and_executorch_and_a_second_size(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="pip install 'linvit[openvino]'")
    linvit.save(small("stella", depth=1), tmp_path / "saved")
    done = linvit.export(tmp_path / "saved", "openvino", size=(48, 96), count=2)
    assert done.path == tmp_path / "saved" / "model.xml" and done.size == (48, 96)
    assert done.checks[0].relative < 1e-4 and done.path.with_suffix(".bin").exists()
    pytest.importorskip("executorch", reason="pip install 'linvit[executorch]'")
    lowered = linvit.export(tmp_path / "saved", "executorch", count=2)
    assert lowered.checks[0].relative < 1e-4 and 0.5 < lowered.facts["delegated"] <= 1


def test_executorch_takes_talking_heads_or_names_the_layer_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XNNPACK's softmax behind a convolution goes along the wrong dimension, unless it is written otherwise."""
    executorch = pytest.importorskip("linvit.runtimes.executorch")
    pytest.importorskip("executorch", reason="pip install 'linvit[executorch]'")
    torch.manual_seed(0)
    attention = Attention2d(8, key_dim=4, num_heads=2, attn_ratio=2, resolution=4)
    named = {
        "stem": nn.Conv2d(3, 8, 16, 16),
        "attention": attention,
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
    }
    model = nn.Sequential(OrderedDict(named)).eval()
    model.pretrained_cfg = {"input_size": (3, 64, 64)}
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    done = linvit.export(model, "executorch", tmp_path / "model.pte", count=1)
    assert done.checks[0].relative < 1e-4
    monkeypatch.setattr(executorch, "REWRITTEN", {})
    with pytest.raises(LinvitError, match=r"first in attention "):
        linvit.export(model, "executorch", tmp_path / "wrong.pte", count=1)
    assert {path.name for path in tmp_path.iterdir()} == {"model.pte", "model.pte.json"}


def test_core_ml_is_checked_by_its_structure(tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="pip install 'linvit[coreml]'")
    done = linvit.export(small(), "coreml", tmp_path / "model.mlpackage", precision="fp16")
    assert done.checks == () and done.facts["float32_sums"] >= 4 and done.facts["operations"] > 20
    with pytest.raises(LinvitError, match="nothing can be measured"):
        linvit.export(small(), "coreml", measure=lambda model: {})


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3"])
def test_rotary_position_in_core_ml(name: str, tmp_path: Path) -> None:
    """Core ML takes tensors of five dimensions at most, which pairs of several copies of a head once went beyond."""
    pytest.importorskip("coremltools", reason="pip install 'linvit[coreml]'")
    model = timm.create_model(name, pretrained=False, depth=1, num_classes=5, img_size=56 if "14" in name else 64)
    linvit.convert(model, "qt")
    assert linvit.export(model, "coreml", tmp_path / "model.mlpackage", count=1).facts["float32_sums"] >= 2


def test_half_sums_in_core_ml_are_refused() -> None:
    half = {"op": "matmul", "name": "sum_1", "dtype": "FLOAT16", "shape": [], "inputs": ["a", "b"]}
    with pytest.raises(LinvitError, match="half precision, beginning with sum_1"):
        check_structure([half])
    weighed = {**half, "inputs": ["a"]}
    assert check_structure([weighed]) == {"operations": 1, "float32_sums": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": "tflite"}, "unknown runtime 'tflite'"),
        ({"to": "onnx", "precision": "int4"}, "unknown precision"),
        ({"to": "onnx", "precision": "int8"}, "give --calibrate"),
        ({"to": "coreml", "dynamic": True}, "Core ML cannot have dynamic"),
        ({"to": "coreml", "precision": "int8"}, "Core ML cannot have int8"),
        ({"to": "executorch", "precision": "fp16"}, "ExecuTorch cannot have fp16"),
        ({"to": "onnx", "path": "model.xml"}, "end in .onnx"),
    ],
)
def test_what_cannot_be_had_is_said(given: dict[str, object], message: str) -> None:
    with pytest.raises(LinvitError, match=message):
        linvit.export(small(), **given)


def test_a_mechanism_of_one_size_cannot_be_dynamic() -> None:
    with pytest.raises(LinvitError, match="linformer fixes the size in an exported program"):
        linvit.export(small("linformer"), "onnx", dynamic=True)


def test_of_a_detector_the_trunk_is_exported(tmp_path: Path) -> None:
    shallow = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    model = timm.create_model("faster_rcnn", backbone="vit_tiny_patch16_224", backbone_args=shallow, num_classes=2)
    with pytest.raises(LinvitError, match="depends on the picture"):
        linvit.export(model, "onnx")
    done = linvit.export(model.backbone, "onnx", tmp_path / "model.onnx", size=(64, 96), count=1)
    beside = json.loads(Path(f"{done.path}.json").read_text())
    assert beside["preprocessing"]["mean"] == [0.5] * 3 and beside["classes"] == [] and done.checks[0].agreement is None


def test_a_segmenter_is_exported_whole(tmp_path: Path) -> None:
    shallow = {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64)}
    model = timm.create_model("semantic_fpn", backbone="pvt_v2_b0", backbone_args=shallow, num_classes=3).eval()
    done = linvit.export(model, "onnx", tmp_path / "model.onnx", size=(64, 96), count=1)
    assert done.checks[0].relative < 1e-4 and done.checks[0].agreement is None


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "find_spec", lambda name: None)
    with pytest.raises(LinvitError, match=r"pip install 'linvit\[onnx\]'"):
        linvit.export(small(), "onnx")


def test_a_real_model_with_its_batch_norms_folded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shallow = {"img_size": 128, "depths": (1, 1, 3, 3), "embed_dims": (16, 16, 32, 48)}
    model = timm.create_model("efficientformerv2_s0", num_classes=10, **shallow)
    linvit.convert(model, "relu_linear", drop=("relative_bias", "talking_heads"))
    done = linvit.export(model, "onnx", tmp_path / "model.onnx", count=1)
    assert done.checks[0].relative < 1e-4
    norms = [node for node in onnx.load(done.path).graph.node if node.op_type == "BatchNormalization"]
    assert len(norms) < len([module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]) / 4
