"""Mobile-Attention against loops over tokens and heads, its conservation, and the scale of its two denominators."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import TokenGrid, create_attention
from linvit.attention.flow import conserved_flows
from linvit.errors import LinvitError
from tests.attention.cases import Case, call, inputs


def by_loops(q: Tensor, k: Tensor, v: Tensor, small: int, released: bool, eps: float) -> Tensor:
    """One picture, head by head and token by token; q, k, v are (tokens, channels)."""
    tokens, channels = q.shape
    heads = channels // small
    wide = v.shape[1] // heads
    phi_q = [[torch.sigmoid(q[t, h * small : (h + 1) * small]) for h in range(heads)] for t in range(tokens)]
    phi_k = [[torch.sigmoid(k[t, h * small : (h + 1) * small]) for h in range(heads)] for t in range(tokens)]
    incoming, gate, source = (torch.zeros(tokens, heads, dtype=torch.float64) for _ in range(3))
    for t in range(tokens):
        i = [float((phi_q[t][h] + eps) @ (sum(phi_k[t]) + eps)) for h in range(heads)]
        o = [float((phi_k[t][h] + eps) @ (sum(phi_q[t]) + eps)) for h in range(heads)]
        for h in range(heads):
            sent = sum(phi_k[t][g] / o[g] for g in range(heads)) + eps
            taken = sum(phi_q[t][g] / i[g] for g in range(heads)) + eps
            gate[t, h] = 1 / (1 + math.exp(-float((phi_q[t][h] + eps) @ sent)))
            source[t, h] = float((phi_k[t][h] + eps) @ taken)
            incoming[t, h] = i[h]
    if released:
        source = source.clamp(-1, 1)
    out = torch.zeros(tokens, v.shape[1], dtype=torch.float64)
    for h in range(heads):
        weights = torch.exp(source[:, h]) / torch.exp(source[:, h]).sum() * tokens
        for t in range(tokens):
            row = [float(phi_q[t][h] @ phi_k[s][h]) for s in range(tokens)]
            below = float(incoming[t, h]) if released else sum(row) + eps
            for s in range(tokens):
                value = v[s, h * wide : (h + 1) * wide]
                out[t, h * wide : (h + 1) * wide] += gate[t, h] * row[s] / below * weights[s] * value
    return out


@pytest.mark.parametrize("impl", ["auto", "reference"])  # narrow heads go channel by channel, wide ones as any linear's
@pytest.mark.parametrize("variant", ["poster", "released"])
@pytest.mark.parametrize("small, value_dim", [(2, 8), (4, 12), (8, 4), (2, 4)])
def test_against_loops(variant: str, small: int, value_dim: int, impl: str) -> None:
    q, k, v, _ = inputs(TokenGrid(2, 3, 1), batch=1, value_dim=value_dim, dtype=torch.float64)
    out = create_attention("mobile", variant=variant, small_head_dim=small, impl=impl)(q, k, v)
    merged = [t[0].transpose(0, 1).flatten(1) for t in (q, k, v)]
    expected = by_loops(*merged, small, variant == "released", 1e-6)
    torch.testing.assert_close(out[0].transpose(0, 1).flatten(1), expected)


@pytest.mark.parametrize("variant", ["poster", "released"])
def test_gradients_channel_by_channel(variant: str) -> None:
    grid = TokenGrid(2, 3, 1)
    tensors = [t.requires_grad_() for t in inputs(grid, batch=2, value_dim=12, dtype=torch.float64)[:3]]
    mechanism, found = create_attention("mobile", variant=variant, small_head_dim=2), {}
    assert mechanism.why_reference(*tensors) is None
    for mechanism.impl in ("auto", "reference"):
        found[mechanism.impl] = torch.autograd.grad(mechanism(*tensors).square().sum(), tensors)
    torch.testing.assert_close(found["auto"], found["reference"])


@pytest.mark.parametrize("heads, width", [(6, 64), (192, 2)])
def test_flows_are_conserved_over_the_heads_of_a_token(heads: int, width: int) -> None:
    """The means of Ī and Ō are 1 exactly, so about half of Ō lies beyond the released clamp."""
    generator = torch.Generator().manual_seed(0)
    phi_q, phi_k = (
        torch.randn(2, 197, heads, width, generator=generator, dtype=torch.float64).sigmoid() for _ in range(2)
    )
    _, conserved_in, conserved_out = conserved_flows(phi_q, phi_k, eps=0.0)
    ones = torch.ones(2, 197, 1, dtype=torch.float64)
    torch.testing.assert_close(conserved_in.mean(2), ones)
    torch.testing.assert_close(conserved_out.mean(2), ones)
    assert 0.45 < (conserved_out > 1).double().mean() < 0.55


@pytest.mark.parametrize("heads", [6, 48, 192])
def test_released_is_off_by_tokens_over_heads(heads: int) -> None:
    q, k, v, _ = inputs(TokenGrid(14, 14, 1), heads=heads, head_dim=384 // heads, dtype=torch.float64)
    poster, released = (
        create_attention("mobile", variant=variant, small_head_dim=None)(q, k, v + 1)
        for variant in ("poster", "released")
    )
    assert 0.65 < poster.mean() < 0.85  # σ(1) = 0.73 of the values' mean, at every number of heads
    assert math.isclose(released.mean() / poster.mean(), 197 / heads, rel_tol=0.06)


def test_without_competition_is_plain_linear_attention() -> None:
    q, k, v, _ = inputs(TokenGrid(3, 4), batch=1, heads=1, head_dim=4, dtype=torch.float64)
    out = create_attention("mobile", competition=False, small_head_dim=2, eps=0.0)(q, k, v)
    for pair in (slice(0, 2), slice(2, 4)):
        weights = q[0, 0, :, pair].sigmoid() @ k[0, 0, :, pair].sigmoid().T
        expected = weights / weights.sum(1, keepdim=True) @ v[0, 0, :, pair]
        torch.testing.assert_close(out[0, 0, :, pair], expected)


@pytest.mark.parametrize("gate", ["se", "glu"])
def test_gates_scale_the_merged_output(gate: str) -> None:
    grid = TokenGrid(3, 4)
    gated = Case("mobile", {"competition": False, "gate": gate}).build(grid, dtype=torch.float64)
    tensors = inputs(grid, dtype=torch.float64)
    plain = create_attention("mobile", competition=False)(*tensors[:3])
    merged = plain.transpose(1, 2).reshape(2, 12, 16)
    weights = [p.detach() for p in gated.parameters()]
    if gate == "se":
        hidden = torch.relu(F.linear(merged.mean(1), weights[0], weights[1]))
        factor = torch.sigmoid(F.linear(hidden, weights[2], weights[3]))[:, None]
    else:
        factor = torch.sigmoid(F.linear(tensors[3], weights[0], weights[1]))
    out = call(gated, tensors, grid).transpose(1, 2).reshape(2, 12, 16)
    torch.testing.assert_close(out, merged * factor)


@pytest.mark.parametrize("options", [{}, {"variant": "released"}, {"competition": False, "gate": "se"}], ids=str)
def test_padding_under_a_mask_changes_nothing(options: dict) -> None:
    short, long = TokenGrid(1, 7), TokenGrid(1, 10)
    mechanism = Case("mobile", options).build(long, dtype=torch.float64)
    q, k, v, _ = inputs(long, dtype=torch.float64)
    mask = (torch.arange(10) < 7).expand(2, -1)
    expected = mechanism(q[:, :, :7], k[:, :, :7], v[:, :, :7], short)
    torch.testing.assert_close(mechanism(q, k, v, long, mask=mask)[:, :, :7], expected)


def test_mistakes_are_named() -> None:
    q, k, v, _ = inputs(TokenGrid(1, 4), head_dim=8, value_dim=7)
    with pytest.raises(LinvitError, match="must divide"):
        create_attention("mobile", small_head_dim=3)(q, k, v)
    with pytest.raises(LinvitError, match="do not divide into"):
        create_attention("mobile", small_head_dim=2)(q, k, v)
    with pytest.raises(LinvitError, match="did you mean se"):
        create_attention("mobile", gate="see")
    with pytest.raises(LinvitError, match="needs competition=True"):
        create_attention("mobile", variant="released", competition=False)
