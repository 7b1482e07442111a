"""InLine attention: its weights written out, and the kernel each picture makes for itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from linvit.attention import TokenGrid, create_attention
from linvit.attention.inline import KERNELS
from linvit.errors import LinvitError
from tests.attention.cases import Case, call, inputs


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("keys", [TokenGrid(3, 4, 1), TokenGrid(2, 2, 1)], ids=str)
def test_weights_against_the_formula(kernel: str, keys: TokenGrid) -> None:
    grid = TokenGrid(3, 4, 1)
    q, k, _, _ = inputs(grid, key_grid=keys, dtype=torch.float64)
    implied = create_attention("inline", heads=2, head_dim=8, kernel=kernel).map(q, k, grid, key_grid=keys)
    phi = {
        "identity": lambda t: t,
        "relu": lambda t: t.clamp_min(0),
        "leaky_relu": lambda t: torch.where(t > 0, t, 0.01 * t),
        "exp": lambda t: torch.exp(t / 5),
    }[kernel]
    s, n = 1 / math.sqrt(8), keys.tokens
    for b in range(2):
        for h in range(2):
            for i in range(grid.tokens):
                dots = torch.stack([phi(q[b, h, i]) @ phi(k[b, h, j]) for j in range(n)])
                mean = phi(q[b, h, i]) @ phi(k[b, h]).mean(0)
                torch.testing.assert_close(implied[b, h, i], s * dots / n - s * mean / n + 1 / n)
    torch.testing.assert_close(implied.sum(-1), torch.ones_like(implied.sum(-1)))


def test_linear_part_is_the_taylor_attention() -> None:
    grid = TokenGrid(3, 4, 1)
    q, k, _, _ = inputs(grid, dtype=torch.float64)
    ours = create_attention("inline", heads=2, head_dim=8).map(q, k, grid)
    torch.testing.assert_close(ours, create_attention("taylor").map(q, k, grid))


def test_each_picture_has_its_own_kernel() -> None:
    grid = TokenGrid(4, 5, 1)
    mechanism = Case("inline").build(grid, dtype=torch.float64)
    tensors = q, k, v, x = inputs(grid, dtype=torch.float64)
    local = call(mechanism, tensors, grid) - mechanism.map(q, k, grid) @ v
    assert local[:, :, 0].abs().max() < 1e-12
    first, _, second = mechanism.residual
    for b in range(2):
        mean = x[b].mean(0)
        for h, part in enumerate((slice(0, 8), slice(8, 16))):
            hidden = F.gelu(first.weight[part, :, 0, 0] @ mean[part] + first.bias[part])
            nine = slice(72 * h, 72 * (h + 1))
            kernels = (second.weight[nine, :, 0, 0] @ hidden + second.bias[nine]).reshape(8, 3, 3)
            for c in range(8):
                picture = F.pad(v[b, h, 1:, c].reshape(4, 5), (1, 1, 1, 1))
                for i in range(4):
                    for j in range(5):
                        expected = (picture[i : i + 3, j : j + 3] * kernels[c]).sum()
                        torch.testing.assert_close(local[b, h, 1 + 5 * i + j, c], expected)


def test_padding_leaves_the_mean_that_makes_the_kernel() -> None:
    grid = TokenGrid(6, 4)
    mechanism = Case("inline").build(grid, dtype=torch.float64)
    q, k, v, x = inputs(grid, dtype=torch.float64)
    mask = (torch.arange(24) < 16).expand(2, -1)
    out = mechanism(q, k, v, grid, mask=mask, x=x)[:, :, :16]
    expected = mechanism(q[:, :, :16], k[:, :, :16], v[:, :, :16], TokenGrid(4, 4), x=x[:, :16])
    torch.testing.assert_close(out, expected)


def test_channels_that_do_not_divide_by_heads_are_refused() -> None:
    with pytest.raises(LinvitError, match="do not divide"):
        create_attention("inline", heads=3, head_dim=8, dim=32)
