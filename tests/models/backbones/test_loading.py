"""A classifier's weights and mechanisms in a backbone, and dense models that convert, save and load."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit
from linvit import LinvitError
from linvit.conversion import as_plan
from linvit.conversion.dry_run import image_part
from linvit.models import dense, named
from linvit.models.backbones import Backbone, make_backbone
from linvit.models.backbones.trunks import maps_of
from tests.models.backbones.kinds import VIT, images

SWIN: dict[str, Any] = {"img_size": 64, "embed_dim": 24, "depths": (1, 2, 1, 2), "num_heads": (2, 2, 4, 4)}
QT: dict[str, Any] = {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1)}


def trained(name: str, plan: str | linvit.Plan = "", **args: Any) -> Any:
    """A classifier with every parameter and statistic moved off its initial value."""
    torch.manual_seed(3)
    model = timm.create_model(name, num_classes=7, **args)
    if plan:
        linvit.convert(model, plan)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor += 0.02 * torch.rand_like(tensor)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "args", "plan"),
    [
        ("deit_tiny_patch16_224", VIT, ""),
        ("deit_tiny_patch16_224", VIT, "qt"),
        ("deit_tiny_patch16_224", VIT, as_plan("mixa", keep=2)),
        ("deit_tiny_distilled_patch16_224", VIT, "castling"),
        ("eva02_tiny_patch14_224", {**VIT, "patch_size": 16}, ""),
        ("pvt_v2_b0", {"embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)}, "stella"),
        ("efficientvit_b1", QT, "qt"),
        ("qtvit_1", QT, ""),
    ],
)
@torch.no_grad()
def test_a_classifier_lends_all_it_has(
    name: str, args: dict[str, Any], plan: str | linvit.Plan, tmp_path: Path
) -> None:
    model = trained(name, plan, **args)
    linvit.save(model, tmp_path / "classifier", model_args=args)
    backbone = make_backbone(name, **args).eval()
    backbone.load_trunk(linvit.load(tmp_path / "classifier"))
    maps = maps_of(backbone.trunk, images(64, 64), backbone.layout.indices)
    indices = list(backbone.layout.indices)
    reference = model.forward_intermediates(images(64, 64), indices=indices, intermediates_only=True)
    for found, level in zip(maps, reference, strict=True):
        torch.testing.assert_close(found, level, rtol=0, atol=0)


@torch.no_grad()
def test_tables_are_resampled() -> None:
    model = trained("deit_tiny_patch16_224", **{**VIT, "img_size": (64, 96)}, dynamic_img_size=True)
    backbone = make_backbone("deit_tiny_patch16_224", **{**VIT, "img_size": (96, 64)}).eval()
    backbone.load_trunk(model)
    (last,) = maps_of(backbone.trunk, images(96, 64), backbone.layout.indices)
    (reference,) = model.forward_intermediates(images(96, 64), indices=1, intermediates_only=True)
    torch.testing.assert_close(last, reference)
    swin = trained("swin_tiny_patch4_window7_224", **SWIN, window_size=4)
    larger = make_backbone("swin_tiny_patch4_window7_224", **{**SWIN, "img_size": 128}, window_size=8)
    larger.load_trunk(swin)
    table = larger.trunk.get_parameter("layers.0.blocks.0.attn.relative_position_bias_table")
    assert table.shape == (15 * 15, 2)
    before = swin.layers[0].blocks[0].attn.relative_position_bias_table
    torch.testing.assert_close(table[15 * 15 // 2], before[7 * 7 // 2])  # a token's bias towards itself


@torch.no_grad()
def test_an_adapter_takes_the_table_without_its_class_token() -> None:
    model = trained("deit_tiny_distilled_patch16_224", "stella", **VIT)
    backbone: Any = make_backbone("deit_tiny_distilled_patch16_224", "adapter", **VIT)
    backbone.load_trunk(model)
    assert torch.equal(backbone.trunk.pos_embed, model.pos_embed[:, 2:])
    assert torch.equal(backbone.trunk.blocks[3].attn.qkv.weight, model.blocks[3].attn.qkv.weight)
    assert backbone.trunk.blocks[0].attn.mechanism.name == "stella"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("deit_tiny_patch16_224", {**VIT, "depth": 5}, "it has blocks.4.norm1.weight, which the backbone lacks"),
        ("deit_tiny_patch16_224", {**VIT, "depth": 3}, "it has no blocks.3.norm1.weight"),
        ("deit3_small_patch16_224", VIT, "it has blocks.0.ls1.gamma, which the backbone lacks"),
        ("pvt_v2_b0", {}, "PyramidVisionTransformerV2 is another architecture"),
        ("deit_tiny_patch16_224", {**VIT, "embed_dim": 96}, "cls_token is 1×1×96, and 1×1×48 there"),
    ],
)
def test_another_architecture_is_told(name: str, args: dict[str, Any], message: str) -> None:
    backbone = make_backbone("deit_tiny_patch16_224", **VIT)
    before = {key: tensor.clone() for key, tensor in backbone.state_dict().items()}
    with pytest.raises(LinvitError, match=message):
        backbone.load_trunk(timm.create_model(name, **args))
    assert all(torch.equal(tensor, before[key]) for key, tensor in backbone.state_dict().items())


class Segmenter(dense.DenseModel):
    """The least that is one. What it does with its maps cannot be done on the meta device."""

    task = "segment"

    def __init__(self, backbone: Backbone, num_classes: int, depth: int = 1) -> None:
        super().__init__()
        self.backbone, self.num_classes, self.depth = backbone, num_classes, depth
        self.blocks = nn.ModuleList(nn.Conv2d(backbone.channels[0], num_classes, 1) for _ in range(depth))

    def forward(self, images: Tensor, targets: Any = None) -> Tensor:
        finest = self.backbone(images)[0]
        assert finest.sum().item() == finest.sum().item()
        return self.blocks[0](finest)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> str:
    name = "least_segmenter"
    monkeypatch.setitem(dense.HEADS, name, dense.Head("segment", "segmenters:Segmenter"))  # type: ignore[arg-type]
    monkeypatch.setattr("linvit.models.segmenters.Segmenter", Segmenter, raising=False)
    if not timm.is_model(name):
        named.add_model(name, dense.build, named.default_cfg(num_classes=80), fetches=True)
    return name


@pytest.mark.parametrize(
    ("backbone", "pyramid", "args", "plan"),
    [
        ("deit_tiny_patch16_224", "simple", VIT, "qt"),
        ("deit_tiny_patch16_224", "adapter", VIT, "castling"),
        ("mixa_deit_tiny_p14", "adapter", {**VIT, "img_size": 56, "keep": 2}, "agent"),
        ("swin_tiny_patch4_window7_224", "auto", {**SWIN, "window_size": 4}, as_plan("mixa", keep=2)),
        ("efficientvit_b1", "auto", QT, "qt"),
    ],
)
@torch.no_grad()
def test_dense_models_convert_save_and_load(
    registered: str, backbone: str, pyramid: str, args: dict[str, Any], plan: str | linvit.Plan, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        registered, backbone=backbone, pyramid=pyramid, backbone_args=args, num_classes=5, depth=2
    )
    assert image_part(model) is model.backbone
    report = linvit.convert(model, plan, size=64)
    assert all(layer.name.startswith("backbone.trunk.") for layer in report.layers)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor += 0.02 * torch.rand_like(tensor)
    linvit.save(model, tmp_path / "dense")
    again = linvit.load(tmp_path / "dense")
    x = images(75, 98)
    assert torch.equal(model.eval()(x), again(x))
    assert again.state_dict().keys() == model.state_dict().keys()


def test_calibration_looks_at_the_maps(registered: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(registered, backbone="deit_tiny_patch16_224", backbone_args=VIT)
    report = linvit.convert(model, "mixa", keep=2, calibrate=[images(64, 64)])
    assert sum(layer.after == "relu_quadratic" for layer in report.layers) == 2
