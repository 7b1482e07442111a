"""What every registered mechanism must do in half precision and under autocast."""

from __future__ import annotations

import copy

import pytest
import torch

from linvit.attention import TokenGrid
from tests.attention.cases import Case, call, every, inputs, relative_rms, supported


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_against_float64(case: Case, dtype: torch.dtype) -> None:
    grid = supported(case, TokenGrid(14, 14, 1))
    mechanism = case.build(grid)
    tensors = inputs(grid, dtype=dtype)
    out = call(mechanism, tensors, grid)
    exact = call(copy.deepcopy(mechanism).double(), tuple(t.double() for t in tensors), grid)
    assert out.dtype == dtype
    assert relative_rms(out, exact) < (2e-3 if dtype == torch.float16 else 8e-3)


@every
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_in_bfloat16(case: Case, masked: bool) -> None:
    """Of q, k, v and every parameter, beside those of float64."""
    grid = supported(case, TokenGrid(7, 6, 1))
    mechanism = case.build(grid)
    if masked and not mechanism.capabilities.key_mask:
        return
    kept = torch.tensor([[grid.tokens], [grid.tokens - 9]])
    mask = torch.arange(grid.tokens) < kept if masked else None
    exact = copy.deepcopy(mechanism).double()
    found = []
    for made, dtype in ((mechanism, torch.bfloat16), (exact, torch.float64)):
        tensors = tuple(t.to(dtype).requires_grad_() for t in inputs(grid, dtype=torch.bfloat16))
        out = call(made, tensors, grid, mask=mask)
        (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)).sum().backward()
        found.append([t.grad for t in (*tensors, *made.parameters())])
    for ours, wanted in zip(*found, strict=True):
        assert (ours is None) == (wanted is None)
        assert ours is None or (ours.double() - wanted).norm() < 3e-2 * wanted.norm() + 1e-3


@every
def test_model_in_bfloat16(case: Case) -> None:
    """model.bfloat16() turns the parameters too; the output stays near that of float32."""
    grid = supported(case, TokenGrid(6, 6, 1))
    mechanism = case.build(grid)
    tensors = inputs(grid, dtype=torch.bfloat16)
    out = call(copy.deepcopy(mechanism).bfloat16(), tensors, grid)
    assert out.dtype == torch.bfloat16
    assert relative_rms(out, call(mechanism, tuple(t.float() for t in tensors), grid)) < 5e-2


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_tokens_stay_finite(case: Case, dtype: torch.dtype) -> None:
    grid = TokenGrid(256, 256)
    can = case.build(TokenGrid(4, 4)).capabilities
    if not (can.linear and can.normalised):
        assert not (can.linear and can.normalised)
        return
    mechanism = case.build(grid, heads=1)
    tensors = inputs(grid, heads=1, batch=1, dtype=dtype, scale=4.0)
    assert call(mechanism, tensors, grid).isfinite().all()


@every
def test_autocast_stays_outside(case: Case) -> None:
    grid = supported(case, TokenGrid(4, 4, 1))
    mechanism = case.build(grid)
    tensors = inputs(grid)
    plain = call(mechanism, tensors, grid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(mechanism, tensors, grid)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, plain)
