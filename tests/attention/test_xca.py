"""XCA by hand, and the local patch interaction on the residual stream."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import Size, TokenGrid, create_attention
from tests.attention.cases import Case, inputs

GRID = TokenGrid(3, 4, 1)
PYRAMID = ((2, 96), (2, 192), (6, 384), (2, 768))


@pytest.mark.parametrize("variant", ["xcit", "fair"])
def test_channels_attend_to_channels(variant: str) -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mechanism = Case("xca", {"variant": variant}).build(GRID, dtype=torch.float64)
    out = mechanism(q, k, v)
    for b in range(2):
        for h in range(2):
            for i in range(8):
                logits = []
                for j in range(8):
                    product = q[b, h, :, i] @ k[b, h, :, j]
                    if variant == "xcit":
                        product = product / (q[b, h, :, i].norm() * k[b, h, :, j].norm()) * mechanism.temperature[h]
                    else:
                        product = product / GRID.tokens**0.5
                    logits.append(product)
                torch.testing.assert_close(out[b, h, :, i], v[b, h] @ torch.stack(logits).softmax(0))


def test_temperature() -> None:
    """It starts at one for each head; at zero every channel becomes the mean of them."""
    q, k, v, _ = inputs(GRID)
    mechanism = create_attention("xca", heads=2)
    assert torch.equal(mechanism.temperature, torch.ones(2))
    mechanism.temperature.data.zero_()
    torch.testing.assert_close(mechanism(q, k, v), v.mean(-1, keepdim=True).expand_as(v))
    assert not list(create_attention("xca", variant="fair").parameters())


def test_scale_of_queries_and_keys() -> None:
    """XCiT's norm takes the scale of q and k away, the Fair Comparison's form keeps it."""
    q, k, v, _ = inputs(GRID)
    xcit, fair = create_attention("xca", heads=2), create_attention("xca", variant="fair")
    torch.testing.assert_close(xcit(3 * q, 0.2 * k, v), xcit(q, k, v))
    assert not torch.allclose(fair(3 * q, k, v), fair(q, k, v))


def test_masked_tokens_are_as_if_absent() -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mask = torch.arange(GRID.tokens).expand(2, -1) < 9
    for variant in ("xcit", "fair"):
        mechanism = Case("xca", {"variant": variant}).build(GRID, dtype=torch.float64)
        alone = mechanism(q[:, :, :9], k[:, :, :9], v[:, :, :9])
        torch.testing.assert_close(mechanism(q, k, v, mask=mask)[:, :, :9], alone)


@pytest.mark.parametrize("variant", ["xcit", "fair"])
def test_local_patch_interaction(variant: str) -> None:
    mechanism = Case("xca", {"variant": variant, "lpi": True}).build(GRID, dtype=torch.float64)
    assert mechanism.capabilities.between
    mechanism.lpi.batch_norm.running_mean.normal_()
    mechanism.lpi.batch_norm.running_var.uniform_(0.5, 2)
    x = inputs(GRID, dtype=torch.float64)[3]
    out = mechanism.between(x, GRID)
    lpi = mechanism.lpi
    normed = F.layer_norm(x[:, 1:], (16,), lpi.norm.weight, lpi.norm.bias, 1e-6)
    picture = normed.reshape(2, 3, 4, 16).permute(0, 3, 1, 2)
    picture = F.gelu(F.conv2d(picture, lpi.first.weight, lpi.first.bias, padding=1, groups=16))
    local = lpi.second(lpi.batch_norm(picture)).permute(0, 2, 3, 1).reshape(2, 12, 16)
    scale = lpi.scale if variant == "xcit" else 1.0
    torch.testing.assert_close(out[:, 1:], x[:, 1:] + scale * local)
    assert torch.equal(out[:, :1], x[:, :1])


def test_without_lpi_nothing_happens_between() -> None:
    mechanism = create_attention("xca", heads=2)
    x = torch.randn(2, GRID.tokens, 16)
    assert mechanism.between(x, GRID) is x and not mechanism.capabilities.between
    assert mechanism.between_macs(Size(1, 2, 8, 8, GRID, GRID)) == 0


def test_macs_between() -> None:
    mechanism = create_attention("xca", dim=24, heads=2, lpi=True).eval()
    with FlopCounterMode(display=False) as counter:
        mechanism.between(torch.randn(3, GRID.tokens, 24), GRID)
    assert 2 * mechanism.between_macs(Size(3, 2, 8, 8, GRID, GRID)) == counter.get_total_flops()


def test_parameters_in_the_fair_pyramid() -> None:
    """28.271 M without, 28.377 M with the Fair Comparison's LPI; XCiT's adds its LayerScale and temperatures."""

    def total(variant: str) -> int:
        found = 28_271_272
        for depth, dim in PYRAMID:
            mechanism = create_attention("xca", heads=dim // 32, head_dim=32, variant=variant, lpi=True)
            found += depth * sum(p.numel() for p in mechanism.parameters())
        return found

    assert total("fair") == 28_271_272 + 24 * 4416 and round(total("fair") / 1e6, 3) == 28.377
    assert total("xcit") == total("fair") + 4416 + 138


def test_layer_scale_starts_where_told() -> None:
    mechanism = create_attention("xca", heads=2, head_dim=8, lpi=True, lpi_scale=1e-5).eval()
    x = torch.randn(2, GRID.tokens, 16)
    assert 0 < (mechanism.between(x, GRID) - x).abs().max() < 1e-4


def test_between_gets_gradients_and_trains() -> None:
    mechanism = Case("xca", {"lpi": True}).build(GRID).train()
    mechanism.between(torch.randn(2, GRID.tokens, 16), GRID).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mechanism.lpi.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mechanism.between(torch.randn(2, GRID.tokens, 16), GRID).dtype == torch.float32
