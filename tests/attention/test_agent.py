"""Agent attention against the formula with pooling and biases written out, on the grid it was built for and others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linvit.attention import TokenGrid, create_attention
from linvit.errors import LinvitError
from tests.attention.cases import Case, inputs


def cells(side: int, parts: int) -> list[range]:
    return [range(i * side // parts, -(-(i + 1) * side // parts)) for i in range(parts)]


def spread(line: Tensor, length: int) -> Tensor:
    """Half-pixel linear resizing along the last axis."""
    size = line.shape[-1]
    columns = []
    for i in range(length):
        place = min(max((i + 0.5) * size / length - 0.5, 0.0), size - 1.0)
        left = int(place)
        columns.append((1 + left - place) * line[..., left] + (place - left) * line[..., min(left + 1, size - 1)])
    return torch.stack(columns, -1)


def bias_of(bias: torch.nn.Module, grid: TokenGrid) -> Tensor:
    table = spread(spread(bias.table.detach(), grid.width).transpose(-2, -1), grid.height).transpose(-2, -1)
    row = spread(bias.row.detach()[..., 0], grid.height)[..., :, None]
    column = spread(bias.column.detach()[..., 0, :], grid.width)[..., None, :]
    patches = (table + row + column).flatten(2)
    return patches if bias.prefix is None else torch.cat((bias.prefix.detach(), patches), -1)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(
    "queries, keys", [((4, 6), (4, 6)), ((9, 5), (9, 5)), ((8, 6), (4, 3)), ((1, 2), (1, 2))], ids=str
)
def test_against_the_formula(queries: tuple[int, int], keys: tuple[int, int], prefix: int) -> None:
    """Built for 4×6 every time: the biases follow the resolution."""
    grid, key_grid = TokenGrid(*queries, prefix), TokenGrid(*keys, prefix)
    mechanism = Case("agent", {"agents": (2, 3)}).build(TokenGrid(4, 6, prefix), dtype=torch.float64)
    q, k, _, _ = inputs(grid, key_grid=key_grid, dtype=torch.float64)
    implied = mechanism.map(q, k, grid, key_grid=key_grid)
    to_keys, to_queries = bias_of(mechanism.key_bias, key_grid), bias_of(mechanism.query_bias, grid)
    for b in range(2):
        for h in range(2):
            picture = q[b, h, prefix:].reshape(*queries, 8)
            agents = torch.stack(
                [
                    torch.stack([picture[i, j] for i in rows for j in columns]).mean(0)
                    for rows in cells(queries[0], 2)
                    for columns in cells(queries[1], 3)
                ]
            )
            collect = (agents @ k[b, h].T / math.sqrt(8) + to_keys[h]).softmax(-1)
            hand_out = (q[b, h] @ agents.T / math.sqrt(8) + to_queries[h].T).softmax(-1)
            torch.testing.assert_close(implied[b, h], hand_out @ collect)
    torch.testing.assert_close(implied.sum(-1), torch.ones_like(implied.sum(-1)))


def test_49_agents_by_default_at_another_resolution() -> None:
    built, larger = TokenGrid(14, 14, 1), TokenGrid(24, 18, 1)
    mechanism = create_attention("agent", heads=2, head_dim=8, grid=built)
    assert mechanism.key_bias.table.shape == (2, 49, 7, 7)
    q, k, v, _ = inputs(larger)
    assert mechanism(q, k, v, larger).isfinite().all()


def test_padded_tokens_leave_the_pooling() -> None:
    grid = TokenGrid(4, 6)
    mechanism = Case("agent", {"agents": 2}).build(grid, dtype=torch.float64)
    q, k, v, _ = inputs(grid, dtype=torch.float64)
    mask = torch.rand(2, 24, generator=torch.Generator().manual_seed(0)) < 0.5
    changed = q + 5 * ~mask[:, None, :, None]
    kept = mask[:, None, :, None]
    first, second = (mechanism(t, k, v, grid, mask=mask) * kept for t in (q, changed))
    torch.testing.assert_close(first, second)


def test_local_branch_leaves_prefix_tokens_alone() -> None:
    grid = TokenGrid(4, 6, 2)
    mechanism = Case("agent", {"agents": 2}).build(grid, dtype=torch.float64)
    q, k, v, _ = inputs(grid, dtype=torch.float64)
    local = mechanism(q, k, v, grid) - mechanism.map(q, k, grid) @ v
    assert local[:, :, :2].abs().max() < 1e-12 and local[:, :, 2:].abs().max() > 0.1


def test_another_number_of_prefix_tokens_is_refused() -> None:
    grid = TokenGrid(4, 4, 2)
    mechanism = create_attention("agent", heads=2, head_dim=8, grid=TokenGrid(4, 4, 1))
    q, k, v, _ = inputs(grid)
    with pytest.raises(LinvitError, match="built for 1 prefix"):
        mechanism(q, k, v, grid)
