"""RALA, MALA, NaLa, PolaFormer and MHLA against their formulas, written out token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import LinvitError, TokenGrid, create_attention
from linvit.attention import Mechanism, begin_at_zero
from tests.attention.cases import Case, call, inputs, relative_rms

GRID = TokenGrid(3, 5, 1)
BARE = {"kernel_size": None, "gate": False}


def elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, x.exp() - 1) + 1


def rala(q: Tensor, k: Tensor) -> Tensor:
    kappa_q, kappa_k, (n, d) = elu(q), elu(k), k.shape
    answers = torch.stack([(kappa_q.sum(0) / len(q)) @ kappa_k[j] / math.sqrt(d) for j in range(n)])
    alpha = answers.exp() / answers.exp().sum() * n
    rows = [[kappa_q[i] @ (alpha[j] * kappa_k[j]) for j in range(n)] for i in range(len(q))]
    weights = torch.tensor(rows, dtype=torch.float64)
    return weights / n / (weights.mean(1, keepdim=True) + 1e-6)


def mala(q: Tensor, k: Tensor) -> Tensor:
    phi_q, phi_k, (n, d) = elu(q), elu(k), k.shape
    rows = []
    for i in range(len(q)):
        z = sum(phi_q[i] @ phi_k[j] for j in range(n)) / n / math.sqrt(d)
        rows.append([(1 + 1 / (z + 1e-6)) * (phi_q[i] @ phi_k[j]) / math.sqrt(d) / n - z / n for j in range(n)])
    return torch.tensor(rows, dtype=torch.float64)


def nala(q: Tensor, k: Tensor) -> Tensor:
    n = len(k)
    phi_k = [torch.cat((torch.relu(k[j] ** 3), torch.relu(-(k[j] ** 3)))) for j in range(n)]
    rows = []
    for i in range(len(q)):
        length = math.sqrt(float((q[i] ** 2).sum()))
        phi_q = torch.cat((torch.relu(q[i]), torch.relu(-q[i]))) / length
        phi_q = phi_q ** (3 * (0.5 + math.tanh(length)))
        row = torch.stack([phi_q @ phi_k[j] for j in range(n)])
        rows.append(row / n / (row.mean() + 1e-6))
    return torch.stack(rows)


@pytest.mark.parametrize("formula", [rala, mala, nala], ids=lambda formula: formula.__name__)
def test_map_is_the_formula(formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    options = BARE | ({"norm": False} if formula is nala else {})
    mechanism = create_attention(formula.__name__, **options)
    out = mechanism(q, k, v)
    for image in range(2):
        for head in range(2):
            weights = formula(q[image, head], k[image, head])
            torch.testing.assert_close(out[image, head], weights @ v[image, head], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(mechanism.map(q, k)[image, head], weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name, slack", [("mala", 1e-5), ("rala", 1e-5), ("nala", 1e-3), ("mhla", 1e-5)])
def test_rows_sum_to_one(name: str, slack: float) -> None:
    q, k, _, _ = inputs(GRID, dtype=torch.float64)
    options = {"norm": False, **BARE} if name == "nala" else {"kernel_size": None} if name == "mhla" else BARE
    rows = create_attention(name, **options).map(q, k, GRID).sum(-1)
    assert (rows - 1).abs().max() < slack


def test_long_queries_sharpen_mala_and_nala_and_not_rala() -> None:
    q, k, _, _ = inputs(GRID, dtype=torch.float64)

    def spread(name: str, scale: float) -> float:
        options = {"norm": False, **BARE} if name == "nala" else BARE
        return float(create_attention(name, **options).map(scale * q.abs(), k).std(-1).mean())

    assert spread("mala", 8) > 2 * spread("mala", 1) and spread("nala", 8) > 1.05 * spread("nala", 0.3)


def written_out_pola(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid) -> Tensor:
    """One image and head; the head's power, scale and position are given with the mechanism."""
    n, half = len(k), v.shape[1] // 2
    out = torch.zeros_like(v)
    for i in range(len(q)):
        same, opposite = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        for j in range(n):
            for c in range(q.shape[1]):
                scale = math.log(1 + math.exp(mechanism["scale"][c]))
                power = 1 + 4 / (1 + math.exp(-mechanism["power"][c]))
                a, b = float(q[i, c]) / scale, float(k[j, c] + mechanism["position"][j, c]) / scale
                product = abs(a) ** power * abs(b) ** power
                (same if a * b > 0 else opposite)[j] += product
        out[i, :half] = same @ v[:, :half] / (same.sum() + n * 1e-6)
        out[i, half:] = opposite @ v[:, half:] / (opposite.sum() + n * 1e-6)
    return out


def test_pola_keeps_signs_apart() -> None:
    mechanism: Any = Case("pola", BARE).build(GRID, dtype=torch.float64)
    q, k, v, _ = inputs(GRID, dtype=torch.float64)
    out = mechanism(q, k, v, GRID)
    for head in range(2):
        table = mechanism.position.table[0].unflatten(0, (2, 8))[head].flatten(1).t()
        own = {
            "scale": mechanism.scale[head, 0].tolist(),
            "power": mechanism.power[head, 0].tolist(),
            "position": torch.cat((torch.zeros(1, 8, dtype=torch.float64), table)).detach(),
        }
        expected = written_out_pola(own, q[0, head], k[0, head], v[0, head], GRID)
        torch.testing.assert_close(out[0, head].detach(), expected, rtol=1e-6, atol=1e-8)
    with pytest.raises(LinvitError, match="halves the values of a head: 7 channels are odd"):
        create_attention("pola", heads=2, head_dim=8, value_dim=7, grid=GRID)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_mhla_mixes_the_states_of_blocks(variant: str) -> None:
    """Blocks of 2 × 2 tokens on 4 × 4; the class token is seen by all and sees all."""
    grid = TokenGrid(4, 4, 1)
    mechanism: Any = Case("mhla", {"variant": variant, "blocks": 2, "kernel_size": None}).build(
        grid, dtype=torch.float64
    )
    q, k, v, _ = inputs(grid, dtype=torch.float64)
    phi_q, phi_k = torch.relu(q[0, 0]) + 1e-6, torch.relu(k[0, 0]) + 1e-6
    mixing = mechanism.mixing.detach().abs()
    block = [None] + [2 * (row // 2) + column // 2 for row in range(4) for column in range(4)]
    place = [None] + [2 * (row % 2) + column % 2 for row in range(4) for column in range(4)]
    for i in range(17):
        weight = torch.stack([
            (1.0 if block[i] is None or block[j] is None else mixing[block[i], block[j]]) * (phi_q[i] @ phi_k[j])
            for j in range(17)
        ])  # fmt: skip
        total = weight.sum()
        if variant == "released" and i:
            total = phi_q[i] @ phi_k[0]
            for other in range(1, 17):
                if place[other] == place[i]:
                    sums = sum(phi_k[j] for j in range(1, 17) if block[j] == block[other])
                    total = total + mixing[block[i], block[other]] * (phi_q[other] @ sums)
        expected = (weight / (total + 1e-6)) @ v[0, 0]
        torch.testing.assert_close(mechanism(q, k, v, grid)[0, 0, i].detach(), expected)


def test_mhla_starts_with_near_blocks_and_serves_grids_that_do_not_divide() -> None:
    mixing = create_attention("mhla", kernel_size=None, blocks=3).mixing.detach()
    assert mixing.shape == (9, 9)
    torch.testing.assert_close(mixing.sum(0), torch.ones(9))
    corner = mixing[:, 0] / mixing[0, 0]
    torch.testing.assert_close(corner[[1, 4, 8]], 1 - torch.tensor([1.0, 2**0.5, 8**0.5]) / 8**0.5)
    with pytest.raises(LinvitError, match="blocks of mhla must be a whole number from 1 to 64, got 0"):
        create_attention("mhla", blocks=0)


@pytest.mark.parametrize("name", ["rala", "mala", "nala", "pola"])
def test_around_the_map_are_a_convolution_and_a_gate(name: str) -> None:
    mechanism: Any = Case(name, {"norm": False} if name == "nala" else {}).build(GRID, dtype=torch.float64)
    q, k, v, x = inputs(GRID, dtype=torch.float64)
    core = mechanism.map(q, k, GRID)
    heads = core.shape[1]
    out = (core @ v.transpose(1, 2).reshape(2, 16, heads, -1).transpose(1, 2)).transpose(1, 2).reshape(2, 16, 16)
    picture = v[:, :, 1:].permute(0, 1, 3, 2).reshape(2, 16, 3, 5)
    weight, bias = mechanism.conv.conv.weight, mechanism.conv.conv.bias
    if name == "pola":
        weight, bias = weight.repeat(2, 1, 1, 1), bias.repeat(2)
    local = F.conv2d(picture, weight, bias, padding=2, groups=16).flatten(2).transpose(1, 2)
    gate = x @ mechanism.gate.linear.weight.t() + mechanism.gate.linear.bias
    gate = gate * gate.sigmoid() if name == "nala" else gate
    expected = (out + F.pad(local, (0, 0, 1, 0))) * gate
    found = call(mechanism, (q, k, v, x), GRID).transpose(1, 2).reshape(2, 16, 16)
    torch.testing.assert_close(found, expected)
    begin_at_zero(mechanism)
    torch.testing.assert_close(call(mechanism, (q, k, v, x), GRID).transpose(1, 2).reshape(2, 16, 16), out)


def test_nala_normalises_all_channels_before_the_gate() -> None:
    q, k, v, x = inputs(GRID, dtype=torch.float64)
    mechanism: Any = Case("nala").build(GRID, dtype=torch.float64)
    mechanism.norm.reset_parameters()
    begin_at_zero(mechanism)
    merged = call(mechanism, (q, k, v, x), GRID).transpose(1, 2).reshape(2, 16, 16)
    torch.testing.assert_close(merged.mean(-1), torch.zeros(2, 16, dtype=torch.float64), atol=1e-9, rtol=0)
    assert ((merged.var(-1, unbiased=False) - 1).abs() < 1e-2).all()


def linear() -> list[str]:
    from linvit.attention import LinearAttention, list_mechanisms, mechanism_class

    return [name for name in list_mechanisms() if issubclass(mechanism_class(name), LinearAttention)]


@pytest.mark.parametrize("name", linear())
def test_centred_keys_hide_what_all_keys_share(name: str) -> None:
    """As softmax does; a feature map by itself does not, unless it centres already."""
    grid = TokenGrid(3, 4)
    q, k, v, x = inputs(grid, dtype=torch.float64)
    shift = torch.linspace(-2, 3, 8, dtype=torch.float64)
    mask = torch.arange(grid.tokens).expand(2, -1) < 10
    centred, plain = (Case(name, options).build(grid, dtype=torch.float64) for options in ({"centre": True}, {}))
    out = call(centred, (q, k, v, x), grid, mask=mask)
    assert relative_rms(call(centred, (q, k + shift, v, x), grid, mask=mask), out) < 1e-9
    middle = k[:, :, :10].mean(2, keepdim=True)
    assert relative_rms(call(plain, (q, k - middle, v, x), grid, mask=mask), out) < 1e-9
    already = name in ("efficient", "inline", "taylor")
    assert (relative_rms(call(plain, (q, k + shift, v, x), grid), call(plain, (q, k, v, x), grid)) < 1e-9) == already


def test_dynamic_filters_are_made_from_each_image() -> None:
    grid = TokenGrid(3, 5, 1)
    q, k, v, _ = inputs(grid, dtype=torch.float64)
    mechanism: Any = Case("relu_linear", {"dynamic": 3}).build(grid, dtype=torch.float64)
    found = mechanism(q, k, v, grid) - create_attention("relu_linear")(q, k, v)
    first, _, last = mechanism.conv.filters
    for image in range(2):
        mean = v[image].mean(1).flatten()
        hidden = first.weight @ mean + first.bias
        kernels = (last.weight @ (hidden * hidden.sigmoid()) + last.bias).reshape(16, 1, 3, 3)
        picture = v[image, :, 1:].transpose(1, 2).reshape(1, 16, 3, 5)
        local = F.conv2d(picture, kernels, padding=1, groups=16).reshape(2, 8, 15).transpose(1, 2)
        torch.testing.assert_close(found[image, :, 1:], local)
        torch.testing.assert_close(found[image, :, 0], torch.zeros(2, 8, dtype=torch.float64))
    fresh = create_attention("relu_linear", heads=2, head_dim=8, dynamic=3, local=5)
    torch.testing.assert_close(fresh(*inputs(grid)[:3], grid), create_attention("relu_linear")(*inputs(grid)[:3]))
    with pytest.raises(LinvitError, match="dynamic of relu_linear must be an odd number from 1 to 255 or 0, got 4"):
        create_attention("relu_linear", heads=2, head_dim=8, dynamic=4)


def test_the_implementation_reaches_what_is_inside() -> None:
    both: Mechanism = create_attention("stella", heads=2, head_dim=8, dynamic=3, local=3, impl="reference")
    assert [m.impl for m in both.modules() if isinstance(m, Mechanism)] == ["reference"] * 3
