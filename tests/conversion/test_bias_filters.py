"""A relative bias that is given up leaves its work to a filter on the values, as far as one can do it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.attention import TokenGrid, create_attention
from linvit.conversion import convert, droppable
from linvit.conversion.bias_filters import Watched
from tests.conversion.families import FAMILIES, Family

BIASED = [family for family in FAMILIES if "relative_bias" in droppable(family.build())]


def local_bias(grid: TokenGrid, heads: int, reach: float = 1.0) -> Tensor:
    """Falls with the distance between tokens, as learned biases do."""
    rows = torch.arange(grid.height).repeat_interleave(grid.width).double()
    columns = torch.arange(grid.width).repeat(grid.height).double()
    distance = (rows[:, None] - rows).hypot(columns[:, None] - columns)
    return -distance.expand(1, heads, -1, -1) * torch.linspace(1, 2, heads).reshape(1, -1, 1, 1) / reach


def test_the_filter_is_the_least_squares_answer() -> None:
    """Against one system of equations for each head, with all rows written out."""
    grid = TokenGrid(6, 7, 1)
    q, k, v = torch.randn(3, 4, 2, grid.tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = F.pad(local_bias(TokenGrid(6, 7), 2), (1, 0, 1, 0))
    watched = Watched(create_attention("softmax"), 3)
    out = watched(q, k, v, grid, bias=bias)
    torch.testing.assert_close(out, create_attention("softmax")(q, k, v, grid, bias=bias))
    filters, share = watched.solve()
    logits = q @ k.transpose(-2, -1) / 8**0.5
    moved = (((logits + bias).softmax(-1) - logits.softmax(-1)) @ v)[:, :, 1:]
    padded = F.pad(v[:, :, 1:].transpose(2, 3).unflatten(-1, (6, 7)), (1, 1, 1, 1))
    left, whole = 0.0, float(moved.square().sum())
    for head in range(2):
        taps = [padded[:, head, :, r : r + 6, c : c + 7].flatten(2).transpose(1, 2) for r in range(3) for c in range(3)]
        system, wanted = torch.stack([tap.flatten() for tap in taps], 1), moved[:, head].flatten()
        expected = torch.linalg.lstsq(system, wanted[:, None]).solution[:, 0]
        torch.testing.assert_close(filters[head].flatten(), expected, rtol=0.01, atol=2e-3)
        left += float((wanted - system @ filters[head].flatten()).square().sum())
    assert share == pytest.approx(1 - left / whole, rel=1e-6)
    assert 0.2 < share < 1


def vit() -> Any:
    torch.manual_seed(0)
    small = {"img_size": 64, "patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": 7}
    model: Any = timm.create_model("vit_relpos_small_patch16_224", rel_pos_type="bias", **small)
    for block in model.blocks:
        table = block.attn.rel_pos.relative_position_bias_table
        offsets = torch.arange(15) - 7.0
        table.data = -offsets[:, None].hypot(offsets).flatten()[:, None] * torch.tensor([1.0, 1.5, 2.0])
        block.ls1 = nn.Identity()
    return model.eval()


@pytest.mark.parametrize("plan", ["relu_linear", "stella"])
def test_a_converted_model_stays_nearer_to_its_original(plan: str) -> None:
    """On smooth pictures too, on which nothing was fitted."""
    original = vit()
    noise = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    smooth = F.interpolate(noise[..., ::8, ::8], (64, 64), mode="bilinear")
    distance: dict[str, list[float]] = {}
    for start in ("zero", "fitted"):
        model = copy.deepcopy(original)
        report = convert(model, plan, drop="relative_bias", local=5)
        assert all(layer.filtered is not None and layer.filtered > 0.5 for layer in report.layers)
        assert "gave up relative_bias (" in str(report) and "% of it in local)" in str(report)
        if start == "zero":
            for block in model.blocks:
                nn.init.zeros_(block.attn.mechanism.conv.conv.weight)
        with torch.no_grad():
            found = [float((model.forward_features(x) - original.forward_features(x)).norm()) for x in (noise, smooth)]
        distance[start] = found
    for fitted, zero in zip(distance["fitted"], distance["zero"], strict=True):
        assert fitted < 0.9 * zero


@pytest.mark.parametrize("family", BIASED, ids=str)
def test_every_family_with_a_bias_has_its_filters(family: Family) -> None:
    model, twin = family.build(), family.build()
    drop = tuple(feature for feature in sorted(droppable(model)) if feature != "pooling")
    report = convert(model, "relu_linear", drop=drop, local=3, size=family.sizes[0])
    having = [layer for layer in report.layers if "relative_bias" in layer.dropped]
    assert having and all(layer.filtered is not None and 0 <= layer.filtered <= 1 for layer in having)
    assert convert(twin, "relu_linear", drop=drop, local=3, size=family.sizes[0]) == report
    with torch.no_grad():
        out = model(family.image())
        assert out.isfinite().all() and torch.equal(out, twin(family.image()))


def test_without_a_local_branch_or_for_training_from_scratch_nothing_is_fitted() -> None:
    for options in ({}, {"local": 5, "quiet": False}, {"dynamic": 3}):
        model = vit()
        report = convert(model, "relu_linear", drop="relative_bias", **options)
        assert all(layer.filtered is None for layer in report.layers)
    honoured = vit()
    assert all(layer.filtered is None for layer in convert(honoured, "relu_quadratic", local=5).layers)
    again = convert(honoured, "stella", drop="relative_bias", local=5)  # what ReLU-quadratic did with the bias
    assert all(layer.filtered is not None for layer in again.layers)


def test_the_error_says_what_takes_its_place() -> None:
    with pytest.raises(linvit.LinvitError, match="local=5 then begins as the filter nearest to the bias"):
        convert(vit(), "stella")
