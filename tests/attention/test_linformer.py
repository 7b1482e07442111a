"""Linformer by hand, its parameters, and the number of tokens it is fixed to."""

from __future__ import annotations

import pytest
import torch

from linvit.attention import Mechanism, TokenGrid, create_attention
from linvit.errors import LinvitError
from tests.attention.cases import Case, inputs

GRID = TokenGrid(4, 6, 1)


def parameters(mechanism: Mechanism) -> int:
    return sum(p.numel() for p in mechanism.parameters())


@pytest.mark.parametrize("options", [{"rank": 5}, {"rank": 5, "share_kv": True}, {"variant": "fair"}], ids=str)
def test_by_hand(options: dict) -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mechanism = Case("linformer", options).build(GRID, dtype=torch.float64)
    e = mechanism.for_keys.weight
    f = e if mechanism.for_values is None else mechanism.for_values.weight
    shift = mechanism.for_keys.bias[:, None] if options.get("variant") == "fair" else 0.0
    out = mechanism(q, k, v)
    for b in range(2):
        for h in range(2):
            keys, values = e @ k[b, h] + shift, f @ v[b, h] + shift
            torch.testing.assert_close(out[b, h], (q[b, h] @ keys.T / 8**0.5).softmax(-1) @ values)


def test_one_row_per_token_is_softmax() -> None:
    """With E = F = 1 nothing is compressed."""
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mechanism = create_attention("linformer", grid=GRID, share_kv=True).double()
    assert mechanism.rank == GRID.tokens
    mechanism.for_keys.weight.data = torch.eye(GRID.tokens, dtype=torch.float64)
    torch.testing.assert_close(mechanism(q, k, v), create_attention("softmax")(q, k, v))


def test_parameters() -> None:
    grid = TokenGrid(32, 32)
    assert parameters(create_attention("linformer", grid=grid)) == 2 * 1024 * 256
    assert parameters(create_attention("linformer", grid=grid, rank=64, share_kv=True)) == 1024 * 64
    weight = create_attention("linformer", grid=grid, rank=64).for_keys.weight
    assert 0.124 < weight.abs().max() <= 0.125


def test_parameters_in_the_fair_pyramid() -> None:
    """28.271 M becomes 30.914 M with patches of 4; patches of 7 make 28.281 M into 28.563 M."""
    for base, sides, ranks, published in (
        (28_271_272, (56, 28, 14, 7), (392, 98, 24, 6), 30.914),
        (28_280_776, (32, 16, 8, 4), (128, 32, 8, 2), 28.563),
    ):
        total = base
        for depth, side, rank in zip((2, 2, 6, 2), sides, ranks, strict=True):
            mechanism = create_attention("linformer", variant="fair", grid=TokenGrid(side, side))
            assert mechanism.rank == rank
            total += depth * parameters(mechanism)
        assert round(total / 1e6, 3) == published


def test_fixed_number_of_keys() -> None:
    with pytest.raises(LinvitError, match="grid="):
        create_attention("linformer")
    mechanism = create_attention("linformer", grid=TokenGrid(3, 2))
    q, k, v, _ = inputs(GRID, key_grid=TokenGrid(3, 2))
    assert mechanism(q, k, v).shape == q.shape
    with pytest.raises(LinvitError, match="fixed to the 6 tokens it was built for, got 25"):
        mechanism(q, q, q)
    assert create_attention("linformer", variant="fair", grid=TokenGrid(1, 3)).rank == 1


def test_capabilities_name_what_grows() -> None:
    original, fair = (create_attention("linformer", grid=GRID, variant=v).capabilities for v in ("original", "fair"))
    assert original.linear and not original.normalised
    assert fair.normalised and not fair.linear
