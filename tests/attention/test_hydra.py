"""Hydra against loops."""

import math

import torch

from linvit.attention import Size, TokenGrid, create_attention
from tests.attention.cases import inputs


def test_against_loops() -> None:
    grid, key_grid = TokenGrid(2, 3, 1), TokenGrid(1, 2, 1)
    q, k, v, _ = inputs(grid, key_grid=key_grid, dtype=torch.float64)
    out = create_attention("hydra")(q, k, v)
    for b in range(2):
        q_length = [math.sqrt(float((q[b, :, t] ** 2).sum())) for t in range(7)]
        k_length = [math.sqrt(float((k[b, :, t] ** 2).sum())) for t in range(3)]
        for h in range(2):
            for c in range(8):
                total = sum(float(k[b, h, s, c]) / k_length[s] * float(v[b, h, s, c]) for s in range(3))
                for t in range(7):
                    assert math.isclose(
                        float(out[b, h, t, c]), float(q[b, h, t, c]) / q_length[t] * total, rel_tol=1e-9
                    )


def test_every_channel_has_a_map_of_rank_one() -> None:
    q, k, _, _ = inputs(TokenGrid(3, 4), dtype=torch.float64)
    implied = create_attention("hydra").map(q, k)
    assert implied.shape == (2, 16, 12, 12)
    assert (torch.linalg.matrix_rank(implied) == 1).all()


def test_costs_two_products_per_token_and_channel() -> None:
    grid = TokenGrid(14, 14, 1)
    assert create_attention("hydra").macs(Size(1, 6, 64, 64, grid, grid)) == 2 * 197 * 384


def test_a_token_of_zeros_stays_finite() -> None:
    q, k, v, _ = inputs(TokenGrid(1, 4))
    q[:, :, 1], k[:, :, 2] = 0, 0
    out = create_attention("hydra")(q, k, v)
    assert out.isfinite().all() and (out[:, :, 1] == 0).all()
