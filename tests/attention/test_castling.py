"""Castling against its formula token by token, and its training branch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from linvit.attention import TokenGrid, create_attention
from linvit.errors import LinvitError
from tests.attention.cases import HEADS, Case, inputs

GRID = TokenGrid(4, 5, 1)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def conv_along_tokens(v: Tensor, taps: Tensor) -> Tensor:
    """One filter per head, shared by its channels, zeros beyond the ends."""
    half, out = taps.shape[1] // 2, torch.zeros_like(v)
    for i in range(v.shape[2]):
        for t in range(taps.shape[1]):
            if 0 <= i + t - half < v.shape[2]:
                out[:, :, i] += taps[:, t, None] * v[:, :, i + t - half]
    return out


def test_released_order() -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mechanism = Case("castling").build(GRID, dtype=torch.float64)
    cosines = torch.einsum("bhid,bhjd->bhij", unit(q), unit(k))
    core = v / 2 + torch.einsum("bhij,bhjd->bhid", cosines, v) / math.pi
    expected = unit(core) + conv_along_tokens(v, mechanism.conv.conv.weight[:, 0, :, 0])
    torch.testing.assert_close(mechanism(q, k, v, GRID), expected)
    assert sum(p.numel() for p in mechanism.parameters()) == 9 * HEADS


def test_without_a_convolution_the_output_has_unit_length() -> None:
    q, k, v, _ = inputs(GRID)
    for size in (None, 0):
        out = create_attention("castling", kernel_size=size)(q, k, v, GRID)
        torch.testing.assert_close(out.norm(dim=-1), torch.ones(out.shape[:3]))
    with pytest.raises(LinvitError, match="odd"):
        create_attention("castling", heads=2, kernel_size=4)


def test_own_value_of_subsampled_and_pooled_hosts() -> None:
    mechanism = create_attention("castling", kernel_size=None)
    fine, coarse = TokenGrid(4, 6, 1), TokenGrid(2, 3, 1)
    q, k, _, _ = inputs(coarse, key_grid=fine, dtype=torch.float64)
    own = mechanism.map(q, k, coarse, key_grid=fine) - unit(q) @ unit(k).mT / math.pi
    taken = [0] + [1 + row * 6 + column for row in (0, 2) for column in (0, 2, 4)]
    torch.testing.assert_close(own[0, 0], torch.eye(25, dtype=torch.float64)[taken] / 2)
    own = mechanism.map(k, q, fine, key_grid=coarse) - unit(k) @ unit(q).mT / math.pi
    torch.testing.assert_close(own.sum(-1), torch.full_like(own.sum(-1), 0.5))
    assert own[0, 0, 0, 0] == pytest.approx(0.5) and (own > -1e-9).all()


@pytest.mark.parametrize("threshold", [None, 0.1])
def test_training_branch(threshold: float | None) -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64, scale=2.0)
    mechanism = create_attention("castling", kernel_size=None, sparse=True, threshold=threshold).double().train()
    attention = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    kept = attention > (threshold or 4 / GRID.tokens)
    assert 0 < kept.double().mean() < 0.5
    core = v / 2 + unit(q) @ (unit(k).mT @ v) / math.pi
    torch.testing.assert_close(mechanism(q, k, v, GRID), unit(core + (attention * kept) @ v))
    torch.testing.assert_close(mechanism.kept, kept.double().mean())
    mechanism.sparse_scale.fill_(0.0)
    torch.testing.assert_close(mechanism(q, k, v, GRID), unit(core))


def test_kept_counts_only_keys_that_take_part() -> None:
    q, k, v, _ = inputs(TokenGrid(4, 5), scale=2.0)
    mechanism = create_attention("castling", kernel_size=None, sparse=True).train()
    mask = torch.arange(20).expand(2, 20) < 12
    mechanism(q, k, v, TokenGrid(4, 5), mask=mask)
    masked = mechanism.kept.clone()
    mechanism(q, k[:, :, :12], v[:, :, :12], TokenGrid(4, 5), key_grid=TokenGrid(4, 3))
    torch.testing.assert_close(masked, mechanism.kept)


def test_inference_is_the_same_with_and_without_the_branch() -> None:
    tensors = inputs(GRID)[:3]
    plain, castled = Case("castling").build(GRID), Case("castling", {"sparse": True}).build(GRID)
    assert torch.equal(plain(*tensors, GRID), castled(*tensors, GRID))
    assert not torch.equal(plain(*tensors, GRID), castled.train()(*tensors, GRID))
    plain.load_state_dict(castled.state_dict(), strict=True)


def test_gradient_passes_through_kept_entries_only() -> None:
    """With values that are one at a single key, only queries that keep this key get a gradient."""
    mechanism = create_attention("castling", sparse=True, kernel_size=None).double().train()
    q, k, _, _ = inputs(GRID, batch=1, heads=1, dtype=torch.float64, scale=2.0)
    q.requires_grad_()
    v = torch.zeros_like(k)
    v[:, :, 3] = 1.0
    call = mechanism._check(q, k, v, GRID, None, None, None, None)
    mechanism.sparse_branch(q, k, v, call).sum().backward()
    kept = ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) > 4 / GRID.tokens)[0, 0, :, 3]
    assert kept.any() and not kept.all()
    assert torch.equal(q.grad[0, 0].abs().sum(-1) > 0, kept)


def test_training_compiles_as_one_graph_and_does_not_recompile() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    q, k, v, _ = inputs(GRID)
    mechanism = create_attention("castling", heads=2, sparse=True).train()
    compiled = torch.compile(lambda *tensors: mechanism(*tensors, GRID), fullgraph=True, backend=counter)
    for scale in (1.0, 0.5, 0.0):
        mechanism.sparse_scale.fill_(scale)
        torch.testing.assert_close(compiled(q, k, v), mechanism(q, k, v, GRID))
    assert counter.frame_count == 1 and mechanism.kept > 0


def test_angular_kernel_is_its_series() -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    x = unit(q) @ unit(k).mT
    series = 0.5 + x / math.pi
    for n in range(1, 80):
        series = series + math.comb(2 * n, n) / (4**n * (2 * n + 1) * math.pi) * x ** (2 * n + 1)
    implied = create_attention("angular", variant="output_norm").map(q, k, GRID)
    torch.testing.assert_close(implied, series, atol=1e-5, rtol=0)
    expected = series @ v / series.sum(-1, keepdim=True)
    torch.testing.assert_close(create_attention("angular")(q, k, v, GRID), expected, atol=1e-5, rtol=0)
