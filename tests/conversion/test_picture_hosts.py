"""What the pyramids and hybrids add: grids for sequences cut from pictures, sizes, and layers no whole model shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention2d, MultiQueryAttention2d
from timm.layers.pos_embed_rel import RelPosBias, RelPosBiasTf, RelPosMlp
from torch import nn

from linvit import LinvitError
from linvit.attention import TokenGrid
from linvit.conversion import Choice, Plan, Rule, convert, droppable, find_hosts
from linvit.conversion.hosts.relative import module_bias, table_bias
from linvit.conversion.surveying import REFUSED
from tests.conversion.families import FAMILIES, WINDOWS, Family, permitting

by_name = {family.model: family for family in FAMILIES}
SEQUENCES = {  # the grids their layers see in an image of 128 × 96, the class token apart
    "mobilevit_xxs": [(8, 6)] * 2 + [(4, 3)] * 4 + [(2, 2)] * 3,
    "caformer_s18": [(8, 6), (4, 3)],
    "efficientformer_l1": [(4, 3)],
    "edgenext_xx_small": [(16, 12), (8, 6), (4, 3)],
    "crossvit_9_240": [(8, 8), (4, 4), (4, 4), (8, 8)],  # rescales every image to 64 × 64
    "nest_tiny": [(4, 4)] * 3,
}


def seen_grids(model: nn.Module, image: torch.Tensor) -> list[TokenGrid]:
    seen = []

    def note(mechanism: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(named["key_grid"] or args[3])

    for _, host in find_hosts(model):
        host.mechanism.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(image)
    return seen


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_know_the_picture_they_come_from(name: str) -> None:
    family = by_name[name]
    model = family.build()
    convert(model, permitting("stella"))
    image = family.image() if family.fixed else family.image(128, 96)
    grids = seen_grids(model, image)
    assert [(grid.height, grid.width) for grid in grids] == SEQUENCES[name]
    assert {grid.prefix for grid in grids} == {int(name.startswith("crossvit"))}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_learned_positions_find_their_grid_and_no_weight_is_lost(family: Family) -> None:
    model = family.build()
    before = copy.deepcopy(model.state_dict())
    report = convert(model, "focused", drop=droppable(model) - {"rotary"}, size=family.sizes[0])
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - set(report.removed))
    with torch.no_grad():
        assert all(model(family.image(*size)).isfinite().all() for size in family.sizes)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_layers_converted_one_after_the_other_and_back(family: Family) -> None:
    model = family.build()
    layers = len(find_hosts(model))
    if layers > 1:
        convert(model, permitting(Plan("all but one", Choice("stella"), (Rule(None, layers=(0,)),))))
    convert(model, permitting("stella"))
    direct = family.build()
    convert(direct, permitting("stella"))
    with torch.no_grad():
        torch.testing.assert_close(model(family.image()), direct(family.image()))
        convert(model, permitting(family.native))
        assert model(family.image()).isfinite().all()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.fixed or f.other], ids=str)
def test_a_size_that_is_refused_is_refused_by_the_original_too(family: Family) -> None:
    with pytest.raises((AssertionError, RuntimeError)), torch.no_grad():
        family.build()(family.image(family.size * 2, family.size + 32))


class Wrapped(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)


@pytest.mark.parametrize(
    "attention",
    [
        Attention2d(24, num_heads=3),
        Attention2d(24, 48, num_heads=3, expand_first=True, head_first=True),
        MultiQueryAttention2d(24, num_heads=3, key_dim=8, value_dim=12),
        MultiQueryAttention2d(24, num_heads=3, query_strides=2, kv_stride=2),
    ],
    ids=["heads second", "heads first", "wide values", "strided"],
)
def test_attention_over_pictures_is_exact(attention: nn.Module) -> None:
    original, image = Wrapped(attention).double().eval(), torch.randn(2, 24, 6, 8).double()
    converted = copy.deepcopy(original)
    convert(converted, "softmax")
    torch.testing.assert_close(converted(image), original(image), rtol=1e-10, atol=1e-10)
    convert(converted, "sima")
    assert converted(torch.randn(2, 24, 4, 10).double()).isfinite().all()


def test_pooling_goes_where_a_mechanism_needs_as_many_keys_as_queries() -> None:
    model = Wrapped(MultiQueryAttention2d(24, num_heads=3, query_strides=2, kv_stride=2)).eval()
    with pytest.raises(LinvitError, match=r"drop=\('pooling',\)"):
        convert(model, "fastformer")
    removed = convert(model, "fastformer", drop=("pooling",)).removed
    assert removed and all(".norm." in name or ".down_conv." in name for name in removed)
    assert model(torch.randn(2, 24, 6, 8)).shape == (2, 24, 6, 8)


def test_queries_that_do_not_fit_the_output_are_refused_before_anything_is_touched() -> None:
    model = by_name["coatnet_pico_rw_224"].build()
    with pytest.raises(LinvitError, match="it has another width"):
        convert(model, permitting("fastformer"))
    assert not any(hasattr(host, "mechanism") for _, host in find_hosts(model))


@pytest.mark.parametrize(
    ("name", "mechanism", "why"),
    [
        ("levit_128s", "hydra", "wide values"),
        ("levit_128s", "mala", "subsampled queries"),
        ("efficientformerv2_s0", "hydra", "wide values"),
        ("efficientvit_b1", "fastformer", "an output projection that nothing is added behind"),
        ("lowformer_b0", "fastformer", "an output projection that nothing is added behind"),
        ("cpubone_nano", "fastformer", "an output projection that nothing is added behind"),
    ],
)
def test_what_a_layer_has_no_place_for_is_refused_before_anything_is_touched(
    name: str, mechanism: str, why: str
) -> None:
    model = by_name[name].build()
    with pytest.raises(LinvitError, match=f"{mechanism} cannot serve .*: it has {why}"):
        convert(model, permitting(mechanism))
    assert not any(hasattr(host, "mechanism") for _, host in find_hosts(model))


def test_a_one_query_layer_is_left_to_mechanisms_that_can_serve_it() -> None:
    model = by_name["crossvit_9_240"].build()
    report = convert(model, "fastformer")
    assert [layer.after for layer in report.layers] == ["fastformer", "fastformer", "softmax", "softmax"]
    assert "one query" in str(report)


@pytest.mark.parametrize("kind", [RelPosBias, RelPosBiasTf, RelPosMlp])
def test_relative_positions_on_another_grid(kind: type[nn.Module]) -> None:
    """What a pair of tokens gets depends on its offset only, keeps its direction, and is the original's on its grid."""
    torch.manual_seed(0)
    rel_pos = kind(window_size=(3, 4), num_heads=2).eval()
    if kind is not RelPosMlp:
        nn.init.normal_(rel_pos.relative_position_bias_table)
    grid = TokenGrid(5, 3)
    bias = module_bias(rel_pos, grid)[0].unflatten(1, (5, 3)).unflatten(3, (5, 3))
    torch.testing.assert_close(bias[:, 1, 0, 3, 2], bias[:, 0, 0, 2, 2])
    own = module_bias(rel_pos, TokenGrid(3, 4))
    if kind is RelPosMlp:
        own = own[0].unflatten(1, (3, 4)).unflatten(3, (3, 4))
        torch.testing.assert_close(bias[:, 0, 0, 2, 2], own[:, 0, 0, 2, 2])
        return
    table = rel_pos.relative_position_bias_table
    table = table.flip(-2, -1).flatten(1).t() if kind is RelPosBiasTf else table
    torch.testing.assert_close(table_bias(table, (3, 4), TokenGrid(3, 4)), own)


@pytest.mark.parametrize("name", ["swinv2_tiny_window8_256", "swinv2_cr_tiny_224"])
@pytest.mark.parametrize("mechanism", ["softmax", "stella"])
def test_swin_v2_takes_another_window_after_conversion(name: str, mechanism: str) -> None:
    model = timm.create_model(name, num_classes=7, **WINDOWS).eval()
    convert(model, permitting(mechanism))
    model.set_input_size((96, 96), window_size=(6, 6))
    assert {tuple(host.window_size) for _, host in find_hosts(model)} == {(6, 6)}
    assert model(torch.randn(1, 3, 96, 96)).isfinite().all()


def test_every_refusal_has_a_reason_and_no_host() -> None:
    from linvit.conversion.hosts import HOSTS

    hosted = {f"{host.original.__module__}.{host.original.__name__}" for host in HOSTS}
    assert all(reason and "\n" not in reason for reason in REFUSED.values())
    shared = {name.rsplit(".", 1)[1] for name in hosted} & set(REFUSED)
    assert shared == {"ConvAttention"}  # NextViT's convolution has the name of LowFormer's attention


@pytest.mark.parametrize("name", ["levit_128s", "levit_conv_128s", "efficientformerv2_s0"])
def test_a_gate_reads_the_input_beside_wide_values(name: str) -> None:
    model = by_name[name].build().eval()
    subsampled = [place for place, (layer, _) in enumerate(find_hosts(model)) if "downsample" in layer]
    convert(model, permitting("mala", keep=subsampled))
    with torch.no_grad():
        assert model(torch.randn(1, 3, by_name[name].size, by_name[name].size)).isfinite().all()
