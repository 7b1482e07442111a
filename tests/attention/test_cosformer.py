"""cosFormer against its weights written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from linvit.attention import TokenGrid, create_attention
from tests.attention.cases import inputs

GRID = TokenGrid(4, 6, 2)


def place(grid: TokenGrid, token: int) -> tuple[float, float] | None:
    """Row and column as fractions of the picture; None for a prefix token."""
    if token < grid.prefix:
        return None
    row, column = divmod(token - grid.prefix, grid.width)
    return (row + 0.5) / grid.height, (column + 0.5) / grid.width


@pytest.mark.parametrize("key_grid", [GRID, TokenGrid(2, 3, 2), TokenGrid(2, 3, 0)], ids=str)
def test_grid_weights_pair_by_pair(key_grid: TokenGrid) -> None:
    q, k, v, _ = inputs(GRID, key_grid=key_grid, dtype=torch.float64)
    weights = torch.ones(GRID.tokens, key_grid.tokens, dtype=torch.float64)
    for i in range(GRID.tokens):
        for j in range(key_grid.tokens):
            here, there = place(GRID, i), place(key_grid, j)
            if here and there:
                weights[i, j] = math.prod(math.cos(math.pi / 2 * (a - b)) for a, b in zip(here, there, strict=True))
    assert (weights > 0).all()
    kernel = weights * (q.relu() @ k.relu().mT)
    expected = kernel @ v / kernel.sum(-1, keepdim=True).clamp_min(1e-6)
    torch.testing.assert_close(create_attention("cosformer")(q, k, v, GRID, key_grid=key_grid), expected)


def test_equal_grids_have_the_printed_distance() -> None:
    """Between the first and the last row of H the weight is cos(π/2·(H − 1)/H)."""
    grid = TokenGrid(5, 1)
    ones = torch.ones(1, 1, 5, 1, dtype=torch.float64)
    implied = create_attention("cosformer").map(ones, ones, grid)[0, 0]
    assert implied[0, 4] / implied[0, 0] == pytest.approx(math.cos(math.pi / 2 * 4 / 5))


@pytest.mark.parametrize("queries, keys", [(7, 7), (9, 4), (3, 8)])
def test_sequence_weights(queries: int, keys: int) -> None:
    q, k, v, _ = inputs(TokenGrid.line(queries), key_grid=TokenGrid.line(keys), dtype=torch.float64)
    distance = torch.arange(queries, dtype=torch.float64)[:, None] - torch.arange(keys, dtype=torch.float64)
    kernel = (math.pi / 2 * distance / max(queries, keys)).cos() * (q.relu() @ k.relu().mT)
    expected = kernel @ v / kernel.sum(-1, keepdim=True).clamp_min(1e-6)
    torch.testing.assert_close(create_attention("cosformer", variant="sequence")(q, k, v), expected)


def test_a_query_without_a_match_goes_to_zero() -> None:
    q, k, v, _ = inputs(TokenGrid(2, 2))
    out = create_attention("cosformer")(-q.abs(), k, v, TokenGrid(2, 2))
    assert torch.equal(out, torch.zeros_like(out))
