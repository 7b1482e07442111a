"""The Fair Comparison's models: their exact size, and that they behave as timm models do."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

import linvit
from linvit.errors import LinvitError
from linvit.measurement import count_parameters
from linvit.models import FairPyramid, list_models
from linvit.models.pyramid import FourierPosition, PatchMerging

SHORT = ("sa", "la", "ea", "pa", "aa", "xca", "lpi", "window")
TINY: dict[str, Any] = {"embed_dim": 32, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8), "num_classes": 5}
every = pytest.mark.parametrize("name", [f"fair_pyramid_p{patch}_{short}" for patch in (4, 7) for short in SHORT])
any_kind = pytest.mark.parametrize("name", [f"fair_pyramid_p4_{short}" for short in SHORT])


def tiny(name: str, img_size: int | tuple[int, int] = 64, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, img_size=img_size, **{**TINY, **kwargs})


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name)


def test_all_eighteen_are_registered() -> None:
    names = [name for name in list_models() if name.startswith("fair_")]
    assert len(names) == 18 and {"fair_column_p14", "fair_column_p16", "fair_pyramid_p7_window"} <= set(names)
    assert all(timm.is_model(name) for name in names)


def test_registered_by_an_import_of_any_part() -> None:
    code = "import linvit.conversion, timm; assert timm.is_model('fair_column_p14')"  # which imports linvit before
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("fair_pyramid_p4_sa", 28_271_272),
        ("fair_pyramid_p7_sa", 28_280_776),
        ("fair_pyramid_p4_pa", 28_271_272),  # the random projections are frozen
        ("fair_pyramid_p4_aa", 28_271_272 + 2 * 4416),  # two vectors over the 4416 channels of all blocks
        ("fair_pyramid_p4_la", 30_913_508),
        ("fair_pyramid_p7_la", 28_562_812),
        ("fair_pyramid_p4_lpi", 28_377_256),
        ("fair_pyramid_p7_window", 28_280_776),
        ("fair_column_p14", 21_931_240),
        ("fair_column_p16", 22_000_360),
    ],
)
def test_exact_parameters(name: str, parameters: int) -> None:
    assert count_parameters(on_meta(name)) == parameters


@every
def test_forward_and_gradients_reach_every_parameter(name: str) -> None:
    size = 112 if "_p7_" in name else 64  # two by two tokens in the last stage: one alone has nothing to choose from
    model = tiny(name, img_size=size).train()
    model(torch.randn(2, 3, size, size)).square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not idle


@any_kind
def test_any_input_size(name: str) -> None:
    model = tiny(name).eval()
    for height, width in ((64, 64), (40, 96), (61, 35)):
        picture = torch.randn(1, 3, height, width)
        if name.endswith("_la") and (height, width) != (64, 64):
            with pytest.raises(LinvitError, match=rf"linformer fixes this model to 64×64 .* img_size=\({height}, "):
                model(picture)
        else:
            assert model(picture).shape == (1, 5)


def test_linformer_takes_its_img_size() -> None:
    assert tiny("fair_pyramid_p4_la", img_size=(48, 80))(torch.randn(1, 3, 48, 80)).shape == (1, 5)


@any_kind
def test_state_dict_round_trip(name: str) -> None:
    model, other = tiny(name).eval(), tiny(name).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    other.load_state_dict(model.state_dict())
    picture = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(picture), other(picture), rtol=0, atol=0)


@any_kind
def test_compiles_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    model = tiny(name).eval()
    picture = torch.randn(1, 3, 64, 64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(picture), model(picture))


def test_head_and_classifier() -> None:
    model = tiny("fair_pyramid_p4_ea").eval()
    features = model.forward_features(torch.randn(2, 3, 64, 96))
    assert features.shape == (2, 2, 3, 256) and model.num_features == 256
    assert model.forward_head(features, pre_logits=True).shape == (2, 256)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features.mean((1, 2)))
    assert model.get_classifier().out_features == 5
    model.reset_classifier(7)
    assert model.forward_head(features).shape == (2, 7) and model.num_classes == 7
    model.reset_classifier(0, "")
    assert model(torch.randn(2, 3, 64, 96)).shape == (2, 2, 3, 256)


def test_features_only() -> None:
    model = tiny("fair_pyramid_p4_ea", features_only=True).eval()
    features = model(torch.randn(1, 3, 96, 64))
    assert [tuple(f.shape[1:]) for f in features] == [(32, 24, 16), (64, 12, 8), (128, 6, 4), (256, 3, 2)]
    assert model.feature_info.channels() == [32, 64, 128, 256] and model.feature_info.reduction() == [4, 8, 16, 32]
    pruned = tiny("fair_pyramid_p4_ea", features_only=True, out_indices=(0, 2)).eval()
    for whole, part in zip((features[0], features[2]), pruned(torch.zeros(1, 3, 96, 64)), strict=True):
        assert whole.shape == part.shape
    assert count_parameters(pruned) < count_parameters(model)


def test_column_has_one_feature_map() -> None:
    model = timm.create_model(
        "fair_column_p16", embed_dim=32, depths=(2,), num_heads=(1,), img_size=64, features_only=True
    )
    assert [tuple(f.shape) for f in model(torch.randn(1, 3, 64, 64))] == [(1, 32, 4, 4)]


def test_intermediates_end_in_the_features() -> None:
    model = tiny("fair_pyramid_p4_sa").eval()
    picture = torch.randn(1, 3, 64, 64)
    last, intermediates = model.forward_intermediates(picture, norm=True, output_fmt="NHWC")
    torch.testing.assert_close(last, model.forward_features(picture))
    torch.testing.assert_close(intermediates[-1], last)


def test_gradient_checkpointing_changes_nothing() -> None:
    model, picture = tiny("fair_pyramid_p4_lpi").train(), torch.randn(2, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(picture).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


def test_layer_groups_cover_every_parameter() -> None:
    model = tiny("fair_pyramid_p4_xca")
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len({group["lr_scale"] for group in groups}) >= 6


def test_drop_path_grows_to_its_rate() -> None:
    model = FairPyramid(drop_path_rate=0.2, **TINY)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])


def test_other_channels_and_mechanisms() -> None:
    model = FairPyramid(in_chans=1, mechanism="relu_linear", options={"eps": 1e-5}, **TINY)
    assert model(torch.randn(1, 1, 32, 32)).shape == (1, 5)
    assert model.mechanism.normaliser.eps == 1e-5


def test_clear_errors() -> None:
    with pytest.raises(LinvitError, match="no weights are published for fair_pyramid_p4_sa"):
        timm.create_model("fair_pyramid_p4_sa", pretrained=True)
    with pytest.raises(LinvitError, match="depths has 4 stages and num_heads 1"):
        FairPyramid(num_heads=(3,))
    with pytest.raises(LinvitError, match="32 channels cannot be split into 3 heads"):
        FairPyramid(embed_dim=32)


def test_fourier_position_by_hand() -> None:
    """Channel i of 32 has frequency 10000^(−2⌊i/2⌋/32), sine when even; rows come first. Places run from 1 to H."""
    height, width = 3, 5
    position = FourierPosition(64)
    nn.init.dirac_(position.proj.weight)
    nn.init.zeros_(position.proj.bias)
    picture = position(height, width)[0]
    for row in range(height):
        for column in range(width):
            for i in range(64):
                place = (row + 1) / (height + 1e-6) if i < 32 else (column + 1) / (width + 1e-6)
                angle = place * 2 * math.pi / 10000 ** (2 * (i % 32 // 2) / 32)
                expected = math.cos(angle) if i % 2 else math.sin(angle)
                assert picture[row, column, i].item() == pytest.approx(expected, abs=2e-6)


def test_patch_merging_order() -> None:
    """Neighbours go in as (row, column) = (0, 0), (1, 0), (0, 1), (1, 1); an odd edge is padded with zeros."""
    merging = PatchMerging(1, 4)
    merging.norm = nn.Identity()  # type: ignore[assignment]
    merging.reduction.weight.data = torch.eye(4)
    picture = torch.tensor([[1.0, 2, 3], [4, 5, 6]])[None, :, :, None]
    assert merging(picture)[0, 0].tolist() == [[1, 4, 2, 5], [3, 6, 0, 0]]


def test_a_plan_changes_the_mechanism() -> None:
    """The pyramid's attention is a host: weights stay, learned positions and LPI find their place."""
    model = FairPyramid(**TINY).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    picture = torch.randn(1, 3, 64, 48)
    same = model(picture)
    report = linvit.convert(model, "softmax")
    torch.testing.assert_close(model(picture), same)
    linvit.convert(model, "xca", variant="fair", lpi=True)
    assert not torch.allclose(model(picture), same)
    linvit.convert(model, "qt", size=(64, 64))
    assert {layer.before for layer in report.layers} == {"softmax"}
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
