"""Rows of the implied map, which never is there as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linvit.attention import TokenGrid, create_attention, regroup
from linvit.attention.rows import pull, row_sums
from tests.attention.cases import Case, every, inputs, supported


@every
@pytest.mark.parametrize("key_grid", [None, TokenGrid(3, 2, 2)], ids=["equal", "pooled"])
def test_a_row_times_v_is_the_core(case: Case, key_grid: TokenGrid | None) -> None:
    grid = supported(case, TokenGrid(5, 3, 2))
    key_grid = None if key_grid is None else supported(case, key_grid)
    mechanism = case.build(key_grid or grid, dtype=torch.float64)
    can = mechanism.capabilities
    key_grid = key_grid if can.unequal else None
    if not can.map:
        pytest.skip("it has no map")
    q, k, v, _ = inputs(grid, key_grid=key_grid, dtype=torch.float64)
    entered = mechanism.entered(q, k, grid, key_grid=key_grid)[:3]
    core = mechanism.core(*entered[:2], v, entered[2]) - mechanism.core(*entered[:2], torch.zeros_like(v), entered[2])
    whole = mechanism.map(q, k, grid, key_grid=key_grid)
    for query in (0, grid.prefix, grid.tokens - 1):
        weights = torch.zeros(2, grid.tokens, dtype=torch.float64)
        weights[:, query] = 1.0
        row = pull(mechanism, weights, q, k, v.shape[-1], grid, key_grid=key_grid)
        torch.testing.assert_close((row * v).sum(2), core[:, :, query], rtol=1e-9, atol=1e-9)
        channels = v.shape[1] * v.shape[3] // whole.shape[1]
        expected = regroup(whole[:, :, query, :, None].expand(-1, -1, -1, channels), v.shape[1])
        torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-12)
    mixed = torch.rand(2, grid.tokens, dtype=torch.float64)
    pulled = pull(mechanism, mixed, q, k, v.shape[-1], grid, key_grid=key_grid)
    expected = (mixed[:, None, None] @ whole)[:, :, 0, :, None].expand(-1, -1, -1, channels)
    torch.testing.assert_close(pulled, regroup(expected, v.shape[1]), rtol=1e-9, atol=1e-12)
    sums = row_sums(mechanism, q, k, v.shape[-1], grid, key_grid=key_grid)
    torch.testing.assert_close(sums, whole.sum(-1).mean(1), rtol=1e-9, atol=1e-9)


def test_a_bias_and_a_mask_come_along() -> None:
    grid = TokenGrid(4, 3, 1)
    q, k, _, _ = inputs(grid, dtype=torch.float64)
    bias = torch.randn(1, 2, grid.tokens, grid.tokens, dtype=torch.float64)
    mask = torch.rand(2, grid.tokens) > 0.3
    mask[1] = False
    weights = torch.rand(2, grid.tokens, dtype=torch.float64)
    for name, given in (("softmax", {"bias": bias, "mask": mask}), ("relu_linear", {"mask": mask})):
        mechanism = create_attention(name)
        expected = weights[:, None, None] @ mechanism.map(q, k, grid, **given)
        found = pull(mechanism, weights, q, k, 8, grid, **given)[..., 0]
        torch.testing.assert_close(found, expected.squeeze(2))
        assert not found[1].any()


class Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("name", ["softmax", "stella", "castling", "mobile", "agent", "flow", "qt", "window", "mhla"])
def test_no_tensor_has_a_place_for_every_pair(name: str) -> None:
    grid = TokenGrid(64, 64, 0)
    mechanism = create_attention(name, heads=2, head_dim=8, grid=grid)
    q, k, v, _ = inputs(grid, batch=1)
    weights = torch.zeros(1, grid.tokens)
    weights[0, 7] = 1.0
    with Largest() as seen, torch.no_grad():
        pull(mechanism, weights, q, k, 8, grid)
    assert 0 < seen.elements <= 64 * v.numel() < grid.tokens**2
    with Largest() as seen, torch.no_grad():  # all queries of a quadratic mechanism too, some at a time
        pull(mechanism, torch.full_like(weights, 1 / grid.tokens), q, k, 8, grid)
    assert seen.elements < grid.tokens**2 / 4
