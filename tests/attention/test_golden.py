"""Values worked out by hand or printed in papers' released code, for one small example."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linvit import create_attention

Q = [[1, 2], [-1, 1], [0.5, -2]]
K = [[2, 1], [1, -1], [-3, 0.5]]
V = [[1, 0], [0, 1], [2, -1]]
GOLDEN = {
    "qt": [[0.872079, 0.127921], [0.951015, 0.048985], [0.840731, 0.159269]],
    "relu_linear": [[1, 0], [1.333333, -0.333333], [0.666667, 0.333333]],
    "stella": [[1.414214, 0], [0.471405, -0.117851], [0.235702, 0.117851]],
    "relu_quadratic": [[0.942809, 0], [1.649916, -0.824958], [0, 0.589256]],
}


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)[None, None]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_output(name: str) -> None:
    out = create_attention(name)(tensor(Q), tensor(K), tensor(V))
    torch.testing.assert_close(out, tensor(GOLDEN[name]), rtol=0, atol=2e-6)


def test_golden_similarity_of_qt() -> None:
    """The released kernel before its row sum: ⟨q²/‖q²‖, k²/‖k²‖⟩ + 1."""
    row = create_attention("qt").map(tensor(Q), tensor(K))[0, 0, 0]
    similarity = torch.tensor([1.470588, 1.857493, 1.269380], dtype=torch.float64)
    torch.testing.assert_close(row, similarity / similarity.sum(), rtol=0, atol=1e-6)


def test_qt_exact_is_the_taylor_polynomial() -> None:
    q, k = tensor(Q), tensor(K)
    x = q @ k.transpose(-2, -1) / math.sqrt(2)
    weights = 1 + x + x**2 / 2
    expected = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(create_attention("qt", variant="exact").map(q, k), expected)


def test_qt_is_blind_to_signs_and_scale() -> None:
    q, k, v = tensor(Q), tensor(K), tensor(V)
    qt = create_attention("qt")
    torch.testing.assert_close(qt(3 * q.abs(), -k, v), qt(q, k, v))
