"""What the fused linear attention does beside its formula: rotary position, the local branch, the constant's square."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import Rotary, TokenGrid, create_attention
from linvit.kernels import linear as launch
from linvit.kernels.linear import layout, linear_attention
from tests.kernels.linear_reference import FORMULAS, draw, error, inputs, reference
from tests.kernels.test_local import exactly

PREFIX, TOKENS = 2, 21


def turned(phi: Tensor, angles: Tensor, layout: str) -> Tensor:
    """Pairs of channels as complex numbers, times e^(i·angle); the first tokens stay as they are."""
    split = (-1, 2) if layout == "pairs" else (2, -1)
    pairs = phi.unflatten(-1, split)
    one, other = pairs.unbind(-1 if layout == "pairs" else -2)
    whole = torch.complex(one, other) * torch.polar(torch.ones_like(angles), angles)
    return torch.stack((whole.real, whole.imag), dim=-1 if layout == "pairs" else -2).flatten(-2)


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], most: float) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert error(one, other) < most, index


@pytest.mark.parametrize(
    "turn, heads, dim, own", [("pairs", 3, 6, False), ("halves", 3, 8, True), ("pairs", 1, 72, False)]
)
@pytest.mark.parametrize("name, split", [("relu", False), ("stella", True), ("elu", True)])
def test_rotary_position(
    name: str, split: bool, turn: str, heads: int, dim: int, own: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Turned features in the numerator, plain ones in the row sum; in one launch and in two; angles of every head."""
    if split:
        monkeypatch.setattr(layout, "SMALL", 16)
    launch.prepare.cache_clear()
    formula = FORMULAS[name]._replace(turn=turn)
    tensors = inputs(device, torch.float32, 1, heads, TOKENS * (3 if split else 1), dim)
    tokens = tensors[0].shape[2]
    angles = draw(device, torch.float64, *((heads,) if own else ()), tokens - PREFIX, dim // 2, seed=3)
    both = (lambda a: a.repeat_interleave(2, -1)) if turn == "pairs" else (lambda a: torch.cat((a, a), -1))
    cos, sin = (both(a).float() for a in (angles.cos(), angles.sin()))
    out = linear_attention(*tensors, formula, turn=(cos, sin))
    exact = [t.detach().double().requires_grad_() for t in tensors]
    every_angle = torch.nn.functional.pad(angles, (0, 0, PREFIX, 0))
    q, k, v = exact
    phi = torch.relu if name != "elu" else lambda x: torch.nn.functional.elu(x) + 1
    top = turned(phi(q), every_angle, turn) @ (turned(phi(k), every_angle, turn).mT @ v)
    total = phi(q) @ phi(k).sum(2).unsqueeze(-1) + formula.eps if formula.row_sum else 1.0
    wanted = top * formula.scale / total
    assert error(out, wanted) < 1e-5
    grad = draw(device, torch.float32, *out.shape, seed=9)
    check(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(wanted, exact, grad.double()), 1e-4)
    launch.prepare.cache_clear()


@pytest.mark.parametrize("name", ["angular", "qt"])
def test_local_branch_and_the_constants_square(name: str, device: torch.device) -> None:
    """A packed projection gets one gradient, with that of the branch in it."""
    heads, dim = 2, 8
    filters = ((1, heads, 1, 9, 1), None) if name == "angular" else ((1, 1, dim, 3, 3), (1, 1, dim))
    grid = (TOKENS, 1, 0) if name == "angular" else (4, 5, 1)
    formula = FORMULAS[name]._replace(height=grid[0], width=grid[1], prefix=grid[2], squared=True)
    weight = draw(device, torch.float32, *filters[0]).requires_grad_()
    bias = None if filters[1] is None else draw(device, torch.float32, *filters[1]).requires_grad_()
    scale = torch.tensor(0.8, device=device, requires_grad=True) if name == "qt" else None
    flat = draw(device, torch.float32, 2, TOKENS, 3, heads, dim).requires_grad_()
    leaves = [t for t in (flat, weight, bias, scale) if t is not None]
    out = linear_attention(*(flat * 1.0).permute(2, 0, 3, 1, 4).unbind(0), formula, None, scale, filters=(weight, bias))
    exact = {id(t): t.detach().double().requires_grad_() for t in leaves}
    q, k, v = exact[id(flat)].permute(2, 0, 3, 1, 4).unbind(0)
    square = None if scale is None else exact[id(scale)].square()
    shift = None if bias is None else exact[id(bias)]
    wanted = reference(q, k, v, formula, None, square) + exactly(v, exact[id(weight)], shift, launch.grid_of(formula))
    assert error(out, wanted) < 1e-5
    out.sin().sum().backward()
    wanted.sin().sum().backward()
    check(tuple(t.grad for t in leaves), tuple(exact[id(t)].grad for t in leaves), 1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_an_output_norm_behind_a_row_sum_and_a_constant(masked: bool, device: torch.device) -> None:
    """What no mechanism of ours has, and one of another's may; the norm's gradient needs what was normalised."""
    formula = FORMULAS["relu"]._replace(own=0.5, norm=True, norm_eps=1e-6)
    leaves = [*inputs(device, torch.float32, 2, 3, 21, 8), torch.tensor(0.7, device=device, requires_grad=True)]
    mask = draw(device, torch.float32, 2, 21) > -0.5 if masked else None
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out, wanted = (
        linear_attention(*leaves[:3], formula, mask, leaves[3]),
        reference(*exact[:3], formula, mask, exact[3]),
    )
    assert error(out, wanted) < 1e-5
    check(torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(wanted.sin().sum(), exact), 1e-4)


@pytest.mark.parametrize("name", ["castling", "focused"])
def test_flops_with_a_filter_are_those_of_the_reference(name: str, device: torch.device) -> None:
    grid = TokenGrid(4, 5, 1)
    tensors = [t.detach() for t in inputs(device, torch.float32, 2, 2, grid.tokens, 8)]
    mechanism, counts = create_attention(name, heads=2, head_dim=8, grid=grid).to(device), []
    for mechanism.impl in ("triton", "reference"):
        with FlopCounterMode(display=False) as counter:
            mechanism(*tensors, grid)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "dtype, heads, dim, tokens, taps, split",
    [(torch.float32, 2, 24, 100, 9, False), (torch.float32, 1, 72, 70, 33, True), (torch.float32, 6, 4, 40, 3, False),
     (torch.bfloat16, 3, 16, 197, 9, False)],
)  # fmt: skip
def test_a_filter_along_the_tokens(
    dtype: torch.dtype, heads: int, dim: int, tokens: int, taps: int, split: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As a product with a band, over several tiles; heads in two pieces, in a tile together and too many for that."""
    if split:
        monkeypatch.setattr(layout, "SMALL", 16)
    launch.prepare.cache_clear()
    formula = FORMULAS["angular"]._replace(height=tokens, width=1)
    leaves = [*inputs(device, dtype, 2, heads, tokens, dim), draw(device, torch.float32, 1, heads, 1, taps, 1)]
    leaves[3].requires_grad_()
    out = linear_attention(*leaves[:3], formula, filters=(leaves[3], None))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = reference(*exact[:3], formula) + exactly(exact[2], exact[3], None, launch.grid_of(formula))
    half = dtype == torch.bfloat16
    assert error(out, wanted) < (5e-3 if half else 1e-5)
    grad = draw(device, dtype, *out.shape, seed=9)
    found, exactly_found = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, exact, grad.double())
    check(found, exactly_found, 1e-2 if half else 1e-4)
    launch.prepare.cache_clear()


def test_the_mechanisms_take_it(device: torch.device) -> None:
    """Rotary position and local branches reach the kernel, and castling's second call is the short one."""
    grid = TokenGrid(4, 5, 1)
    q, k, v = (t.detach() for t in inputs(device, torch.float32, 2, 2, grid.tokens, 8))
    rotary = Rotary(*(getattr(Rotary.axial(TokenGrid(4, 5), 8), part).to(device) for part in ("cos", "sin")), blocks=4)
    for name, given in (("relu_linear", {"rotary": rotary}), ("castling", {}), ("focused", {}), ("qt", {})):
        mechanism = create_attention(name, heads=2, head_dim=8, grid=grid, impl="triton").to(device)
        with torch.no_grad():
            outs = [mechanism(q, k, v, grid, **given) for _ in range(2)]
            mechanism.impl = "reference"
            outs.append(mechanism(q, k, v, grid, **given))
        assert len(mechanism.known) == (name in ("castling", "qt"))
        for out in outs[:2]:
            torch.testing.assert_close(out, outs[2], atol=1e-5, rtol=1e-4)
    mechanism = create_attention("qt", heads=2, head_dim=8, shortcut=True, impl="triton").to(device).eval()
    torch.nn.init.uniform_(mechanism.shortcut.norm.running_mean)
    with torch.no_grad():
        out, mechanism.impl = mechanism(q, k, v), "reference"
        torch.testing.assert_close(out, mechanism(q, k, v), atol=1e-5, rtol=1e-4)
    learned = Rotary(rotary.cos.clone().requires_grad_(), rotary.sin, 4)
    why = create_attention("relu_linear").why_reference(q, k, v, grid, rotary=learned)
    assert why is not None and "learned" in why
    assert "softmax" in str(create_attention("efficient").why_reference(q, k, v, grid, rotary=rotary))
