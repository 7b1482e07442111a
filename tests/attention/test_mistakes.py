"""Bad input: one clear line each, which says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linvit
from linvit import LinvitError, TokenGrid, create_attention
from linvit.attention import Call
from tests.attention.cases import relative_rms

GRID = TokenGrid(3, 4, 1)


def qkv(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 2, 13, 8)))


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("stela", {}, "unknown mechanism 'stela'; did you mean stella"),
        ("nothing like it", {}, "unknown mechanism 'nothing like it'; known: agent, "),
        ("stella", {"eps": 1e-6}, "unknown option of stella 'eps'; known: centre, dynamic, local, rotary"),
        ("relu_linear", {"epsilon": 1e-6}, "unknown option of relu_linear 'epsilon'; did you mean eps"),
        ("qt", {"variant": "exakt"}, "unknown variant of qt 'exakt'; did you mean exact"),
        ("qt", {"beta": 1.0}, "beta belongs to variant='compact'"),
        ("qt", {"position": True}, "qt has parameters: give heads=, head_dim=, grid="),
        ("castling", {}, "castling has parameters: give heads="),
        ("mobile", {"gate": "sigmoid", "competition": False}, "unknown gate of mobile"),
        ("linformer", {"heads": 2, "head_dim": 8}, "give grid="),
        ("stella", {"impl": "cuda"}, "unknown implementation 'cuda'"),
    ],
)
def test_building(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LinvitError) as error:
        create_attention(name, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "tensors, kwargs, message",
    [
        ((qkv(2, 13, 8), qkv(), qkv()), {}, "q must be (batch, heads, tokens, head_dim), got shape (2, 13, 8)"),
        ((qkv(), qkv(2, 2, 13, 4), qkv()), {}, "q, k and v do not fit together: q (2, 2, 13, 8), k (2, 2, 13, 4)"),
        ((qkv(), qkv(), qkv(2, 2, 12, 8)), {}, "do not fit together"),
        ((qkv(), qkv(), qkv()), {"grid": TokenGrid(3, 4)}, "the grid 3×4 has 12 tokens but q has 13"),
        ((qkv(), qkv(), qkv()), {"key_grid": TokenGrid(2, 2)}, "the key grid 2×2 has 4 tokens but k has 13"),
        ((qkv(), qkv(), qkv()), {"mask": torch.ones(2, 13)}, "the key mask must be boolean (batch, keys) = (2, 13)"),
        ((qkv(), qkv(), qkv()), {"mask": torch.ones(13).bool()}, "the key mask must be boolean"),
        ((qkv(), qkv(), qkv()), {"bias": torch.zeros(13, 13)}, "stella cannot honour a bias on the logits"),
    ],
)
def test_calling(tensors: tuple[torch.Tensor, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(LinvitError) as error:
        create_attention("stella")(*tensors, **kwargs)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(3, 2, 13, 13), (2, 2, 13, 12), (1, 3, 13, 13), (1, 1, 2, 13, 13)], ids=str)
def test_a_bias_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(LinvitError, match=r"does not fit logits of \(2, 2, 13, 13\)"):
        create_attention("relu_quadratic")(qkv(), qkv(), qkv(), bias=torch.zeros(shape))


def test_grids() -> None:
    with pytest.raises(LinvitError, match="height and width of at least 1"):
        TokenGrid(0, 4)
    with pytest.raises(LinvitError, match="looks at the token grid: give grid="):
        create_attention("cosformer")(qkv(), qkv(), qkv())
    with pytest.raises(LinvitError, match="was built for heads=3, got 2"):
        create_attention("castling", heads=3, head_dim=8)(qkv(), qkv(), qkv(), GRID)
    fixed = create_attention("linformer", heads=2, head_dim=8, grid=TokenGrid(4, 4))
    with pytest.raises(LinvitError, match="fixed to the 16 tokens it was built for, got 13"):
        fixed(qkv(), qkv(), qkv(), GRID)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["stella", "relu_linear", "elu_linear", "efficient", "sima", "taylor", "hydra"]),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    prefix=st.integers(0, 3),
    head_dim=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_any_shape_is_its_map_times_v(
    name: str, batch: int, heads: int, height: int, width: int, prefix: int, head_dim: int, seed: int
) -> None:
    from linvit.attention import regroup

    grid = TokenGrid(height, width, prefix)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, heads, grid.tokens, head_dim, generator=generator, dtype=torch.float64)
    mechanism = linvit.create_attention(name)
    implied = mechanism.map(q, k, grid)
    expected = regroup(implied @ regroup(v, implied.shape[1]), heads)
    assert relative_rms(mechanism.core(q, k, v, Call(grid, grid)), expected) < 1e-8
    torch.testing.assert_close(mechanism(q, k, v, grid), mechanism(q, k, v))
