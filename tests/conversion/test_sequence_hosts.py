"""What single hosts promise beyond the tests of every family."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from linvit import LinvitError
from linvit.attention import TokenGrid
from linvit.conversion import Choice, Plan, Rule, convert
from linvit.conversion.hosts.pooled import layout, stages
from linvit.conversion.hosts.relative import table_bias
from tests.conversion.families import FAMILIES, STATIC, VIT, Family, permitting


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.model == name)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def noisy(model: nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("plan", ["softmax", "stella", "relu_linear"])
@pytest.mark.parametrize("rope", ["none", "axial"])
def test_padding_of_naflexvit_is_a_key_mask(plan: str, rope: str) -> None:
    """A small image in a padded batch gives what it gives alone."""
    options = {"depth": 2, "embed_dim": 48, "num_heads": 3, "rope_type": rope}
    model = noisy(timm.create_model("naflexvit_base_patch16_gap", num_classes=7, **options))
    original = copy.deepcopy(model)
    convert(model, permitting(plan))
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 12:] = False
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"), -1).reshape(1, 20, 2)
    places = places.repeat(2, 1, 1)
    places[1] = 0
    places[1, :12] = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).reshape(12, 2)
    batch = {"patches": torch.randn(2, 20, 768), "patch_coord": places, "patch_valid": valid}
    alone = {name: value[1:, :12] for name, value in batch.items()}
    with torch.no_grad():
        close(model(batch)[1:], model(alone))
        if plan == "softmax":
            close(model(batch), original(batch))
    assert model.use_key_only_attn_mask == (plan != "softmax")


SAM = {"use_rel_pos": False, "use_rope": True, "use_abs_pos": False, "window_size": 4, "global_attn_indexes": (1,)}


@pytest.mark.parametrize("name, options", [("vit_relpos_small_patch16_224", {}), ("samvit_base_patch16", SAM)])
def test_positions_by_formula_are_those_of_a_model_built_for_the_size(name: str, options: dict[str, Any]) -> None:
    small = noisy(timm.create_model(name, num_classes=7, **{**STATIC, **options}))
    large = timm.create_model(name, num_classes=7, **{**STATIC, **options, "img_size": (128, 96)}).eval()
    large.load_state_dict(small.state_dict())
    convert(small, "softmax")
    image = torch.randn(2, 3, 128, 96)
    with torch.no_grad():
        close(small(image), large(image))


def test_a_resized_table_keeps_constants_classes_and_symmetry() -> None:
    rows = torch.full((49, 2), 3.0)
    classes = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    bias = table_bias(torch.cat((rows, classes)), (4, 4), TokenGrid(6, 5, prefix=1))
    assert bias.shape == (1, 2, 31, 31)
    close(bias[..., 1:, 1:], torch.full((1, 2, 30, 30), 3.0))
    assert (bias[..., 0, 1:] == 1).all() and (bias[..., 1:, 0] == 2).all() and (bias[..., 0, 0] == 4).all()
    distance = torch.stack(torch.meshgrid(torch.arange(-3, 4), torch.arange(-3, 4), indexing="ij")).square().sum(0)
    bias = table_bias(distance.float().reshape(49, 1), (4, 4), TokenGrid(6, 5))
    close(bias, bias.transpose(-2, -1))
    assert (bias.diagonal(dim1=-2, dim2=-1) <= bias.amin(-1) + 1e-5).all()


@pytest.mark.parametrize("name, part", [("beitv2_base_patch16_224", "rel_pos_bias"), ("vit_srelpos", "shared_rel_pos")])
def test_the_shared_bias_stays_as_long_as_a_layer_uses_it(name: str, part: str) -> None:
    model: Any = next(f for f in FAMILIES if f.model.startswith(name)).build()
    first = Plan("first", Choice("stella"), (Rule(None, layers=(1,)),))
    convert(model, permitting(first))
    assert getattr(model, part) is not None
    report = convert(model, permitting("stella"))
    assert getattr(model, part) is None and any(part in removed for removed in report.removed)


def test_hiera_lays_tokens_out_row_by_row() -> None:
    model: Any = family("hiera_tiny_224").build()
    for block, (attention, (strides, units)) in enumerate(stages(model)):
        grid, order = layout(strides, units)
        tokens = torch.arange(grid.tokens)
        rolled = model.reroll(tokens.reshape(1, -1, 1), block - (attention.q_stride > 1)).reshape(-1)
        assert torch.equal(tokens[order], rolled)


def test_hiera_puts_tokens_back_where_they_were() -> None:
    original: Any = family("hiera_tiny_224").build()
    model = copy.deepcopy(original)
    convert(model, "softmax")
    for block in model.blocks:
        mechanism = block.attn.mechanism
        mechanism.capabilities = replace(mechanism.capabilities, equivariant=False)
    image = family("hiera_tiny_224").image()
    with torch.no_grad():
        close(model(image), original(image))


@pytest.mark.parametrize("plan, serves", [("stella", True), ("castling", False), ("mobile", False)])
def test_class_attention_is_left_to_mechanisms_that_can_serve_it(plan: str, serves: bool) -> None:
    for name in ("cait_xxs24_224", "xcit_nano_12_p16_224", "volo_d1_224"):
        model = family(name).build()
        report = convert(model, permitting(plan))
        last = report.layers[-1]
        assert (last.after == plan) == serves and ("one query" in str(last)) != serves
        assert model(family(name).image()).isfinite().all()


def test_differential_attention_subtracts_two_maps() -> None:
    original = noisy(timm.create_model("vit_tiny_patch16_224", num_classes=7, **VIT, attn_layer="diff"))
    model = copy.deepcopy(original)
    convert(model, "softmax")
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        close(model(image), original(image))
        convert(model, "relu_linear")
        assert model(torch.randn(2, 3, 96, 64)).isfinite().all()


def test_layers_converted_later_know_the_grid_too() -> None:
    model: Any = family("eva02_tiny_patch14_224").build()
    convert(model, permitting(Plan("first", Choice("stella"), (Rule(None, layers=(1,)),))))
    convert(model, permitting("cosformer"))
    with torch.no_grad():
        model(torch.randn(1, 3, 96, 64))
    assert {block.attn.grids.grid for block in model.blocks} == {TokenGrid(6, 4, 1)}
    assert len(model.patch_embed._forward_pre_hooks) == 1


def test_grids_follow_the_stages() -> None:
    for name, expected in (("pit_ti_distilled_224", TokenGrid(2, 2, 2)), ("csatv2", TokenGrid(1, 1))):
        model: Any = family(name).build()
        convert(model, permitting("cosformer"))
        model(family(name).image())
        hosts = [m for m in model.modules() if getattr(m, "grids", None) is not None]
        assert hosts and hosts[-1].grids.grid == expected, hosts[-1].grids.grid


def test_a_query_is_not_added_behind_a_projection_to_another_width() -> None:
    with pytest.raises(LinvitError, match=r"fastformer cannot serve .*: it has another width"):
        convert(family("csatv2").build(), "fastformer")
