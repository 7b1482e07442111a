"""Performer: what its random features average to, and the Fair Comparison's form by hand."""

from __future__ import annotations

import math

import torch

from linvit.attention import TokenGrid, create_attention
from linvit.attention.performer import orthogonal_rows
from tests.attention.cases import Case, inputs, relative_rms

GRID = TokenGrid(3, 4)


def test_rows_are_orthogonal_in_blocks_and_uniform() -> None:
    torch.manual_seed(0)
    rows = orthogonal_rows(19, 8)
    assert rows.shape == (19, 8)
    for start in range(0, 19, 8):
        block = rows[start : start + 8]
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)), atol=1e-5, rtol=0)
    first = torch.stack([orthogonal_rows(1, 4)[0] for _ in range(2000)])
    assert first.mean(0).abs().max() < 0.06  # QR without its signs fixed gives −0.42 in one coordinate


def test_features_average_to_the_softmax_kernel() -> None:
    """Unbiased: the mean over many rows of W is exp(q·k/√d), and the shift does not change the map."""
    torch.manual_seed(0)
    q, k, _, _ = inputs(GRID, batch=1, heads=1, dtype=torch.float64, scale=0.4)
    mechanism = create_attention("performer", heads=1, head_dim=8, features=2**16, eps=0.0).double()
    rows = mechanism.projection[0]
    x, y = (t[0, 0] * 8**-0.25 for t in (q, k))
    estimate = (
        (x @ rows.T - x.square().sum(-1, keepdim=True) / 2).exp()
        @ (y @ rows.T - y.square().sum(-1, keepdim=True) / 2).exp().T
        / 2**16
    )
    assert relative_rms(estimate, (q[0, 0] @ k[0, 0].T / math.sqrt(8)).exp()) < 0.01
    rows_sum_to_one = estimate / estimate.sum(-1, keepdim=True)
    torch.testing.assert_close(mechanism.map(q, k, GRID)[0, 0], rows_sum_to_one)


def test_the_released_offset_pulls_towards_the_mean() -> None:
    """Many features and long vectors: 1e-4 after the shift sets a floor to the error, eps = 0 takes it away."""
    q, k, v, _ = inputs(GRID, heads=1, dtype=torch.float64)
    softmax = create_attention("softmax", impl="reference")(q, k, v)
    errors = {}
    for eps in (1e-4, 0.0):
        torch.manual_seed(1)
        mechanism = create_attention("performer", heads=1, head_dim=8, features=2**15, eps=eps).double()
        errors[eps] = relative_rms(mechanism(q, k, v), softmax)
    assert errors[0.0] < 0.5 * errors[1e-4]


def test_more_features_come_nearer_to_softmax() -> None:
    q, k, v, _ = inputs(GRID, heads=1, dtype=torch.float64, scale=0.7)
    softmax = create_attention("softmax", impl="reference")(q, k, v)
    errors = []
    for features in (16, 256, 4096):
        torch.manual_seed(1)
        mechanism = create_attention("performer", heads=1, head_dim=8, features=features).double()
        draws = []
        for _ in range(5):
            mechanism.redraw()
            draws.append(relative_rms(mechanism(q, k, v), softmax))
        errors.append(sum(draws) / len(draws))
    assert errors[0] > 2 * errors[1] > 4 * errors[2] and errors[2] < 0.1


def test_default_numbers_of_features() -> None:
    for head_dim, favor, fair in ((32, 110, 16), (64, 266, 32), (1, 1, 1)):
        assert create_attention("performer", heads=2, head_dim=head_dim).projection.shape == (1, favor, head_dim)
        projection = create_attention("performer", heads=2, head_dim=head_dim, variant="fair").projection
        assert projection.shape == (2, fair, head_dim)
        torch.testing.assert_close(projection.norm(dim=-1), torch.full((2, fair), fair**0.5))


def test_fair_by_hand() -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mechanism = Case("performer", {"variant": "fair"}).build(GRID, dtype=torch.float64)
    expected = torch.zeros_like(v)
    for b in range(2):
        for h in range(2):
            rows = mechanism.projection[h]
            psi = [
                torch.stack([torch.exp(rows @ t - t @ t / 2) / 2 for t in x[b, h] * 8**-0.25])  # √m = 2
                for x in (q, k)
            ]
            for i in range(GRID.tokens):
                weights = psi[1] @ psi[0][i]
                expected[b, h, i] = weights @ v[b, h] / (weights.sum() + 1e-6)
    torch.testing.assert_close(mechanism(q, k, v), expected)


def test_redraw_changes_the_saved_rows_and_none_is_trained() -> None:
    mechanism = create_attention("performer", heads=2, head_dim=8)
    before = mechanism.state_dict()["projection"].clone()
    mechanism.redraw()
    assert not torch.equal(before, mechanism.state_dict()["projection"])
    assert not list(mechanism.parameters())


def test_finite_at_common_head_sizes() -> None:
    """Many large tokens: forward and backward, at the widest head the docstring vouches for."""
    for variant in ("favor", "fair"):
        for scale in (0.5, 4.0):
            tensors = [t.requires_grad_() for t in inputs(TokenGrid(64, 64), batch=1, heads=1, head_dim=128)[:3]]
            mechanism = create_attention("performer", heads=1, head_dim=128, variant=variant, features=64)
            out = mechanism(*(scale * t for t in tensors))
            out.sum().backward()
            assert out.isfinite().all() and all(t.grad.isfinite().all() for t in tensors)
    rows = create_attention("performer", heads=1, head_dim=128, variant="fair").projection[:, :1]
    worst = (rows * 128**0.25).expand(1, 1, 1, 128)  # x' on a row of W: the largest exponent there is
    out = create_attention("performer", heads=1, head_dim=128, variant="fair")(worst, worst, worst)
    assert out.isfinite().all()
