"""Fastformer by hand, and what it asks of a host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linvit.attention import TokenGrid, create_attention
from linvit.errors import LinvitError
from tests.attention.cases import Case, inputs

GRID = TokenGrid(3, 4)


def weights(scores: Tensor) -> Tensor:
    return torch.exp(scores) / torch.exp(scores).sum()


def test_original_by_hand() -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mechanism = Case("fastformer").build(GRID, dtype=torch.float64)
    out = mechanism(q, k, v)
    for b in range(2):
        queries, keys = (t[b].transpose(0, 1).reshape(GRID.tokens, 16) for t in (q, k))
        score = mechanism.query_score
        alpha = (queries @ score.weight.T + score.bias) / 8**0.5
        pooled = torch.cat([weights(alpha[:, h]) @ queries[:, 8 * h : 8 * h + 8] for h in range(2)])
        mixed = pooled * keys
        score = mechanism.key_score
        beta = (mixed @ score.weight.T + score.bias) / 8**0.5
        pooled = torch.cat([weights(beta[:, h]) @ mixed[:, 8 * h : 8 * h + 8] for h in range(2)])
        torch.testing.assert_close(out[b].transpose(0, 1).reshape(GRID.tokens, 16), pooled * queries)


def test_fair_by_hand() -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mechanism = Case("fastformer", {"variant": "fair"}).build(GRID, dtype=torch.float64)
    out = mechanism(q, k, v)
    for b in range(2):
        for h in range(2):
            of_q, of_k = mechanism.query_score.weight[h], mechanism.key_score.weight[h]
            pooled = weights(q[b, h] @ of_q / 8**0.5) @ q[b, h]
            pooled = weights((pooled * k[b, h]) @ of_k / 8**0.5) @ k[b, h]
            torch.testing.assert_close(out[b, h], pooled * v[b, h])


def test_parameters() -> None:
    """Two Linear(C → H) or, in the Fair Comparison's pyramid, two vectors a head: 28.271 M + 0.009 M."""
    assert sum(p.numel() for p in create_attention("fastformer", heads=12, head_dim=32).parameters()) == 2 * 385 * 12
    pyramid = sum(
        depth
        * sum(p.numel() for p in create_attention("fastformer", heads=h, head_dim=32, variant="fair").parameters())
        for depth, h in ((2, 3), (2, 6), (6, 12), (2, 24))
    )
    assert round((28_271_272 + pyramid) / 1e6, 3) == 28.280


def test_the_query_comes_back_after_the_projection() -> None:
    q = inputs(GRID)[0]
    mechanism = create_attention("fastformer", heads=2, head_dim=8)
    projected = torch.randn(2, GRID.tokens, 16)
    out = mechanism.after_projection(projected, q)
    torch.testing.assert_close(out[1, 5, 8:], projected[1, 5, 8:] + q[1, 1, 5])
    assert mechanism.after_projection(projected.bfloat16(), q).dtype == torch.bfloat16
    with pytest.raises(LinvitError, match="do not fit"):
        mechanism.after_projection(torch.randn(2, GRID.tokens, 24), q)


def test_masked_tokens_leave_both_poolings() -> None:
    """Under a mask the kept tokens fare as if the others were not there, queries included."""
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    mask = torch.arange(GRID.tokens).expand(2, -1) < 9
    for variant in ("original", "fair"):
        mechanism = Case("fastformer", {"variant": variant}).build(GRID, dtype=torch.float64)
        alone = mechanism(q[:, :, :9], k[:, :, :9], v[:, :, :9])
        torch.testing.assert_close(mechanism(q, k, v, mask=mask)[:, :, :9], alone)
