"""What every registered mechanism must do at the edges: nothing to see, broken padding, large numbers, no images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Mechanism, TokenGrid
from tests.attention.cases import Case, call, every, inputs, supported

NAN = float("nan")


def last_masked(tokens: int, *counts: int) -> Tensor:
    """A mask for each count, its last so many tokens left out."""
    return torch.arange(tokens) < tokens - torch.tensor(counts)[:, None]


def gradients(mechanism: Mechanism, tensors: tuple[Tensor, ...], out: Tensor, weight: Tensor) -> list[Tensor]:
    wanted = [t for t in (*tensors, *mechanism.parameters()) if t.requires_grad]
    found = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def test_softmax_sets_the_example() -> None:
    """PyTorch's own attention: zero where nothing may be seen."""
    out = F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 8), attn_mask=torch.zeros(1, 1, 1, 5).bool())
    assert torch.equal(out, torch.zeros_like(out))


@every
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_all_keys_masked_gives_zeros(case: Case, impl: str) -> None:
    """And finite gradients; the other image of the batch does not notice."""
    grid = supported(case, TokenGrid(3, 4, 1))
    mechanism = case.build(grid, impl=impl).train()
    if not mechanism.capabilities.key_mask:
        return
    tensors = tuple(t.requires_grad_() for t in inputs(grid))
    mask = last_masked(grid.tokens, 2, grid.tokens)
    out = call(mechanism, tensors, grid, mask=mask)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert all(g.isfinite().all() for g in gradients(mechanism, tensors, out, torch.ones_like(out)))
    mechanism.eval()  # BatchNorm in training mode mixes the images of a batch
    alone = call(mechanism, tuple(t[:1] for t in tensors), grid, mask=mask[:1])
    torch.testing.assert_close(call(mechanism, tensors, grid, mask=mask)[:1], alone)
    if mechanism.capabilities.map:
        assert not mechanism.map(*tensors[:2], grid, mask=mask)[1].any()


@every
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_masked_key_of_nan_does_not_leak(case: Case, impl: str) -> None:
    """Neither into any output nor into any gradient: a padded token may hold whatever memory held."""
    grid = supported(case, TokenGrid(3, 4, 1))
    mechanism = case.build(grid, impl=impl)
    if not mechanism.capabilities.key_mask:
        return
    mask = last_masked(grid.tokens, 2, 5)
    found = []
    for filling in (0.0, NAN):
        q, k, v, x = inputs(grid)
        k, v = (t.masked_fill(~mask[:, None, :, None], filling) for t in (k, v))
        tensors = tuple(t.requires_grad_() for t in (q, k, v, x))
        out = call(mechanism, tensors, grid, mask=mask)
        found.append((out, *gradients(mechanism, tensors, out, torch.ones_like(out))))
    for plain, poisoned in zip(*found, strict=True):
        torch.testing.assert_close(poisoned, plain)
        assert poisoned.isfinite().all()


@every
def test_a_padded_query_of_nan_stays_where_it_is(case: Case) -> None:
    """On one grid a padded key is a padded query too: those that stay see none of it."""
    grid = supported(case, TokenGrid(3, 4, 1))
    mechanism = case.build(grid)
    if not mechanism.capabilities.key_mask:
        return
    mask = last_masked(grid.tokens, 2, 5)
    found = []
    for filling in (0.0, NAN):
        q, k, v, x = inputs(grid)
        q, x = q.masked_fill(~mask[:, None, :, None], filling), x.masked_fill(~mask[..., None], filling)
        found.append(torch.where(mask[:, None, :, None], call(mechanism, (q, k, v, x), grid, mask=mask), 0.0))
    torch.testing.assert_close(*found)


@every
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_float16_stays_finite_with_large_numbers(case: Case, scale: float) -> None:
    grid = supported(case, TokenGrid(7, 7, 1))
    for impl in ("auto", "reference"):
        out = call(case.build(grid, impl=impl), inputs(grid, dtype=torch.float16, scale=scale), grid)
        assert out.dtype == torch.float16 and out.isfinite().all()


@every
@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_batch(case: Case, masked: bool) -> None:
    """Forward and backward, in training and in evaluation mode; parameters get gradients of zero."""
    grid = supported(case, TokenGrid(3, 4, 1))
    mask = torch.ones(0, grid.tokens, dtype=torch.bool) if masked else None
    for impl, training in (("auto", True), ("auto", False), ("reference", True)):
        mechanism = case.build(grid, impl=impl).train(training)
        if masked and not mechanism.capabilities.key_mask:
            return
        tensors = tuple(t.requires_grad_() for t in inputs(grid, batch=0))
        out = call(mechanism, tensors, grid, mask=mask)
        assert out.shape == tensors[2].shape
        assert not any(g.any() for g in gradients(mechanism, tensors, out, torch.ones_like(out)))
        if mechanism.capabilities.map:
            assert mechanism.map(*tensors[:2], grid).shape[0] == 0
        if mechanism.capabilities.between:
            x = torch.zeros(0, grid.tokens, 16)
            assert mechanism.between(x, grid).shape == x.shape
