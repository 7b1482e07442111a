"""Focused attention against the formula written out token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import TokenGrid, create_attention
from tests.attention.cases import Case, inputs


def focus(x: Tensor, scale: Tensor) -> Tensor:
    """Tokens (n, C) one by one."""
    rows = []
    for token in x:
        r = (token.clamp_min(0) + 1e-6) / torch.log1p(torch.exp(scale))
        rows.append(r.pow(2).sum().sqrt() * r**3 / (r**3).pow(2).sum().sqrt())
    return torch.stack(rows)


def test_rows_against_the_formula() -> None:
    grid = TokenGrid(3, 4, 1)
    mechanism = Case("focused").build(grid, dtype=torch.float64)
    q, k, _, _ = inputs(grid, dtype=torch.float64)
    implied = mechanism.map(q, k, grid)
    scale = mechanism.scale.detach().flatten()
    position = mechanism.position.table.detach()[0].flatten(1).T
    position = torch.cat((torch.zeros(1, 16, dtype=torch.float64), position))
    for b in range(2):
        phi_q = focus(q[b].transpose(0, 1).flatten(1), scale)
        phi_k = focus(k[b].transpose(0, 1).flatten(1) + position, scale)
        for h, part in enumerate((slice(0, 8), slice(8, 16))):
            similarity = phi_q[:, part] @ phi_k[:, part].T / 13
            torch.testing.assert_close(implied[b, h], similarity / (similarity.sum(1, keepdim=True) + 1e-6))
    assert (implied >= 0).all()


def test_a_query_without_an_active_feature_gives_about_nothing() -> None:
    q, k, _, _ = inputs(TokenGrid(3, 4))
    q[:, :, 5] = -q[:, :, 5].abs()
    grid = TokenGrid(3, 4)
    implied = create_attention("focused", heads=2, head_dim=8, grid=grid).map(q, k, grid)
    rows = implied.sum(-1)
    assert rows.isfinite().all() and rows[:, :, 5].max() < 0.9 and rows[:, :, :5].min() > 0.99


def test_small_scales_do_not_underflow() -> None:
    grid = TokenGrid(3, 4)
    mechanism = create_attention("focused", heads=2, head_dim=8, grid=grid)
    mechanism.scale.data.fill_(1e4)
    q, k, v, _ = inputs(grid)
    assert mechanism(-q.abs(), k, v, grid).isfinite().all()


@pytest.mark.parametrize("keys", [TokenGrid(6, 5, 1), TokenGrid(3, 2, 1)], ids=str)
def test_local_branch_runs_over_the_raster_resized_values(keys: TokenGrid) -> None:
    grid = TokenGrid(6, 5, 1)
    mechanism = Case("focused").build(keys, dtype=torch.float64)
    q, k, v, _ = inputs(grid, key_grid=keys, dtype=torch.float64)
    local = mechanism(q, k, v, grid, key_grid=keys) - mechanism.map(q, k, grid, key_grid=keys) @ v
    assert local[:, :, 0].abs().max() < 1e-12
    weight, bias = mechanism.local.conv.weight.detach(), mechanism.local.conv.bias.detach()
    for h in range(2):
        line = torch.zeros(2, 8, 30, dtype=torch.float64)
        for i in range(30):  # half-pixel linear interpolation, written out
            place = min(max((i + 0.5) * keys.patches / 30 - 0.5, 0.0), keys.patches - 1.0)
            left = int(place)
            right = min(left + 1, keys.patches - 1)
            line[:, :, i] = (1 + left - place) * v[:, h, 1 + left] + (place - left) * v[:, h, 1 + right]
        expected = F.conv2d(line.reshape(2, 8, 6, 5), weight, bias, padding=2, groups=8)
        torch.testing.assert_close(local[:, h, 1:], expected.flatten(2).transpose(1, 2))
