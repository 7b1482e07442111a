"""Flow-Attention against loops, and the conservation its name stands for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linvit.attention import TokenGrid, create_attention
from linvit.attention.flow import conserved_flows
from tests.attention.cases import inputs


def by_loops(q: Tensor, k: Tensor, v: Tensor, eps: float, floor: float) -> Tensor:
    """One head: q (queries, d), k and v (keys, d)."""
    phi_q, phi_k = torch.sigmoid(q), torch.sigmoid(k)
    queries, keys = len(q), len(k)
    incoming = [float((phi_q[i] + eps) @ (sum(phi_k) + eps)) + floor for i in range(queries)]
    outgoing = [float((phi_k[j] + eps) @ (sum(phi_q) + eps)) + floor for j in range(keys)]
    sent = sum(phi_k[j] / outgoing[j] for j in range(keys)) + eps
    taken = sum(phi_q[i] / incoming[i] for i in range(queries)) + eps
    source = [min(1.0, max(-1.0, float((phi_k[j] + eps) @ taken) + floor)) for j in range(keys)]
    total = sum(math.exp(s) for s in source)
    out = torch.zeros(queries, v.shape[1], dtype=torch.float64)
    for i in range(queries):
        sink = float((phi_q[i] + eps) @ sent) + floor
        gate = 1 / (1 + math.exp(-sink * queries / keys))
        for j in range(keys):
            competition = keys * math.exp(source[j]) / total
            out[i] += gate * float(phi_q[i] @ phi_k[j]) / incoming[i] * competition * v[j]
    return out


@pytest.mark.parametrize("variant", ["vision", "general"])
@pytest.mark.parametrize("keys", [6, 4, 9])
def test_against_loops(variant: str, keys: int) -> None:
    grid, key_grid = TokenGrid(1, 6), TokenGrid(1, keys)
    q, k, v, _ = inputs(grid, key_grid=key_grid, value_dim=5, dtype=torch.float64)
    eps = 1e-3  # large enough to see where it goes
    out = create_attention("flow", variant=variant, eps=eps)(q, k, v)
    for b in range(2):
        for h in range(2):
            expected = by_loops(q[b, h], k[b, h], v[b, h], eps, eps if variant == "vision" else 0.0)
            torch.testing.assert_close(out[b, h], expected)


def test_flows_are_conserved() -> None:
    """Each source sends one unit and each sink takes one: Ī sums to the keys, Ō to the queries."""
    q, k, _, _ = inputs(TokenGrid(5, 4), key_grid=TokenGrid(3, 2), dtype=torch.float64)
    _, conserved_in, conserved_out = conserved_flows(q.sigmoid(), k.sigmoid(), eps=0.0)
    torch.testing.assert_close(conserved_in.sum(2), torch.full((2, 2, 1), 6.0, dtype=torch.float64))
    torch.testing.assert_close(conserved_out.sum(2), torch.full((2, 2, 1), 20.0, dtype=torch.float64))


def test_padding_under_a_mask_changes_nothing() -> None:
    q, k, v, _ = inputs(TokenGrid(1, 10), dtype=torch.float64)
    mask = (torch.arange(10) < 7).expand(2, -1)
    flow = create_attention("flow")
    expected = flow(q[:, :, :7], k[:, :, :7], v[:, :, :7])
    torch.testing.assert_close(flow(q, k, v, mask=mask)[:, :, :7], expected)
