"""Rotary position in every mechanism: relative as declared, in the numerator only, refused elsewhere."""

from __future__ import annotations

import pytest
import torch
from timm.layers import apply_rot_embed_cat
from timm.models.gemma4_vit import apply_multidimensional_rope
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linvit import LinvitError, Rotary, TokenGrid, create_attention
from linvit.attention import Call, LinearAttention, Size, regroup
from tests.attention.cases import Case, call, cases, every, inputs, relative_rms, supported

GRID = TokenGrid(3, 4)
HOW = {str(case): case.build(GRID).capabilities.rotary for case in cases()}
turning_features = pytest.mark.parametrize("case", [case for case in cases() if HOW[str(case)] == "features"], ids=str)


def angles(grid: TokenGrid, head_dim: int, down: float = 0.0, right: float = 0.0) -> Tensor:
    """Of each patch and channel pair: half of them by row, half by column, everything moved down and right."""
    speeds = torch.tensor([10.0 ** -(i / (head_dim // 4)) for i in range(head_dim // 4)], dtype=torch.float64)
    places = [(row + down, column + right) for row in range(grid.height) for column in range(grid.width)]
    return torch.stack([torch.cat((row * speeds, column * speeds)) for row, column in places])


def rotary(grid: TokenGrid, head_dim: int = 8, **moved: float) -> Rotary:
    """Neighbouring channels paired."""
    each = angles(grid, head_dim, **moved).repeat_interleave(2, dim=-1)
    return Rotary(each.cos(), each.sin(), head_dim // 2)


@every
def test_position_is_relative_or_refused_as_declared(case: Case) -> None:
    """Where everything stands further down and right nothing changes."""
    grid = TokenGrid(6, 8)
    mechanism = case.build(grid, dtype=torch.float64)
    tensors = inputs(grid, dtype=torch.float64)
    if not mechanism.capabilities.rotary:
        with pytest.raises(LinvitError, match="cannot honour rotary position"):
            call(mechanism, tensors, grid, rotary=rotary(grid))
        return
    out = call(mechanism, tensors, grid, rotary=rotary(grid))
    moved = call(mechanism, tensors, grid, rotary=rotary(grid, down=3, right=-7))
    assert relative_rms(moved, out) < 1e-9
    assert relative_rms(call(mechanism, tensors, grid), out) > 1e-5  # it is seen at all


@turning_features
def test_before_the_feature_map_it_turns_q_and_k(case: Case) -> None:
    before = Case(case.name, {**case.options, "rotary": "before"}).build(GRID, dtype=torch.float64)
    without = {option: value for option, value in case.options.items() if option != "centre"}
    plain = Case(case.name, without).build(GRID, dtype=torch.float64)
    q, k, v, x = inputs(GRID, dtype=torch.float64)
    turn = rotary(GRID)
    out = call(before, (q, k, v, x), GRID, rotary=turn)
    k = k - k.mean(-2, keepdim=True) if "centre" in case.options else k
    assert relative_rms(out, call(plain, (turn(q), turn(k), v, x), GRID)) < 1e-12
    assert relative_rms(call(before, (q, k, v, x), GRID, rotary=rotary(GRID, down=3)), out) > 1e-4


def turned_products(phi_q: Tensor, phi_k: Tensor, grid: TokenGrid, head_dim: int) -> Tensor:
    """φ(q_i)ᵀ R(j − i) φ(k_j) with a matrix for each pair of tokens; none for prefix tokens or constant features."""
    of = torch.cat((torch.zeros(grid.prefix, head_dim // 2, dtype=torch.float64), angles(grid, head_dim)))
    total = torch.zeros(*phi_q.shape[:3], phi_k.shape[2], dtype=torch.float64)
    blocks = phi_q.shape[-1] // head_dim
    for first in range(0, blocks * head_dim, 2):
        angle = of[:, (first % head_dim) // 2]
        apart = angle[None, :] - angle[:, None]
        (a, b), (c, d) = phi_q[..., first : first + 2].unbind(-1), phi_k[..., first : first + 2].unbind(-1)
        along = a[..., :, None] * c[..., None, :] + b[..., :, None] * d[..., None, :]
        across = b[..., :, None] * c[..., None, :] - a[..., :, None] * d[..., None, :]
        total = total + along * apart.cos() + across * apart.sin()
    rest = slice(blocks * head_dim, None)
    return total + phi_q[..., rest] @ phi_k[..., rest].transpose(-2, -1)


@turning_features
@pytest.mark.parametrize("masked", [False, True])
def test_the_numerator_is_turned_and_the_normaliser_is_not(case: Case, masked: bool) -> None:
    grid = supported(case, TokenGrid(3, 4, 2))
    mechanism = case.build(grid, dtype=torch.float64)
    q, k, v, _ = inputs(grid, dtype=torch.float64)
    mask = torch.arange(grid.tokens).expand(2, -1) < grid.tokens - 3 if masked else None
    plain = mechanism.map(q, k, grid, mask=mask)
    turned = mechanism.map(q, k, grid, mask=mask, rotary=rotary(grid))
    q, k, context = mechanism.enter(q, k, Call(grid, grid, mask, rotary=rotary(grid)))
    core = mechanism.core(q, k, v, context)
    assert relative_rms(core, regroup(turned @ regroup(v, turned.shape[1]), 2)) < 1e-9
    if type(mechanism).implied_map is LinearAttention.implied_map:  # nothing more, and no wrapper around one
        phi_q, phi_k = mechanism.features(q, k, Call(grid, grid, mask))
        phi_k = context.keep(phi_k)
        factor = mechanism.normaliser(phi_q, phi_k, 8, context)
        expected = turned_products(phi_q, phi_k, grid, 8) * factor
        assert relative_rms(turned, expected) < 1e-9
        prefix = grid.prefix
        torch.testing.assert_close(turned[:, :, :prefix, :prefix], plain[:, :, :prefix, :prefix])


FEATURES = {
    "relu_linear": torch.relu,
    "elu_linear": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "stella": torch.relu,
    "qt": lambda x: x**2 / (x**2).square().sum(-1, keepdim=True).sqrt(),
}


@pytest.mark.parametrize("name", FEATURES)
def test_against_the_formula(name: str) -> None:
    """Σ_j (φ(q_i)ᵀ R(j − i) φ(k_j)) v_j over the normaliser of the mechanism, written out."""
    grid = TokenGrid(3, 4, 1)
    q, k, v, _ = inputs(grid, dtype=torch.float64)
    phi_q, phi_k = FEATURES[name](q), FEATURES[name](k)
    constant = 1.0 if name == "qt" else 0.0
    numerator = turned_products(phi_q, phi_k, grid, 8) + constant
    rows = (phi_q @ phi_k.transpose(-2, -1) + constant).sum(-1, keepdim=True)
    expected = numerator @ v / (13 * 8**0.5 if name == "stella" else rows)
    out = create_attention(name)(q, k, v, grid, rotary=rotary(grid))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@turning_features
def test_gradients(case: Case) -> None:
    grid = supported(case, TokenGrid(2, 2, 1))
    mechanism = case.build(grid, dtype=torch.float64, head_dim=4, impl="reference")
    tensors = [t.requires_grad_() for t in inputs(grid, batch=1, head_dim=4, dtype=torch.float64, seed=3)]

    def through(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return call(mechanism, (q, k, v, x), grid, rotary=rotary(grid, 4))

    assert torch.autograd.gradcheck(through, tensors, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True)


@turning_features
def test_it_costs_no_macs_and_half_precision_stays_near(case: Case) -> None:
    grid = supported(case, TokenGrid(4, 4, 1))
    mechanism = case.build(grid, impl="reference")
    tensors = inputs(grid, batch=3)
    with FlopCounterMode(display=False) as counter:
        call(mechanism, tensors, grid, rotary=rotary(grid))
    assert 2 * mechanism.macs(Size(3, 2, 8, 8, grid, grid)) == counter.get_total_flops()
    exact = call(case.build(grid, dtype=torch.float64), tuple(t.double() for t in tensors), grid, rotary=rotary(grid))
    half = call(mechanism, tuple(t.bfloat16() for t in tensors), grid, rotary=rotary(grid))
    assert half.dtype == torch.bfloat16 and relative_rms(half, exact) < 0.05


@pytest.mark.parametrize("name", ["castling", "hedgehog"])
def test_compiles_as_one_graph_and_exports(name: str) -> None:
    grid = TokenGrid(3, 4, 1)
    turn = Rotary.axial(grid, 8)

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mechanism = Case(name).build(grid)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return self.mechanism(q, k, v, grid, rotary=Rotary(cos, sin, 4))

    module, tensors = Fixed(), (*inputs(grid)[:3], turn.cos, turn.sin)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*tensors), module(*tensors))
    torch.testing.assert_close(torch.export.export(module, tensors).module()(*tensors), module(*tensors))


@pytest.mark.parametrize("half", [False, True])
def test_layouts_are_those_of_timm(half: bool) -> None:
    x = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    turns = angles(GRID, 8)
    each = torch.cat((turns, turns), -1) if half else turns.repeat_interleave(2, dim=-1)
    found = Rotary(each.cos(), each.sin(), 1 if half else 4)(x)
    torch.testing.assert_close(found, apply_rot_embed_cat(x, torch.cat((each.sin(), each.cos()), -1), half=half))


def test_the_layout_of_gemma() -> None:
    x = torch.randn(2, 12, 3, 8, dtype=torch.float64)
    each = angles(GRID, 8).unflatten(-1, (2, 2)).repeat(1, 1, 2).flatten(1).expand(2, -1, -1)
    expected = apply_multidimensional_rope(x, each.cos(), each.sin()).transpose(1, 2)
    torch.testing.assert_close(Rotary(each.cos()[:, None], each.sin()[:, None], 2)(x.transpose(1, 2)), expected)


def test_axial_angles() -> None:
    turn = Rotary.axial(TokenGrid(2, 3, 1), 8, base=100.0)
    token, speeds = 5, torch.tensor([1.0, 0.1])  # row 1, column 2
    expected = torch.cat((1 * speeds, 2 * speeds)).repeat_interleave(2)
    torch.testing.assert_close(turn.cos[token], expected.cos())
    torch.testing.assert_close(turn.sin[token], expected.sin())


def test_mistakes_are_one_line() -> None:
    grid = TokenGrid(3, 4)
    q, k, v, _ = inputs(grid)
    stella = create_attention("stella")
    for wrong, words in (
        ({"rotary": rotary(grid, 4)}, "12 tokens of 4 channels does not fit q of 12 tokens of 8"),
        ({"rotary": rotary(TokenGrid(4, 4))}, "16 tokens of 8 channels does not fit q of 12"),
    ):
        with pytest.raises(LinvitError, match=words):
            stella(q, k, v, grid, **wrong)
    with pytest.raises(LinvitError, match="as many keys as queries, got 6 and 12"):
        stella(q, k[:, :, :6], v[:, :, :6], grid, rotary=rotary(grid))
    with pytest.raises(LinvitError, match="unknown rotary of stella 'befor'; did you mean before"):
        create_attention("stella", rotary="befor")
    with pytest.raises(LinvitError, match="multiple of 4"):
        Rotary.axial(grid, 6)


def test_the_kernel_says_why_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from linvit.attention import linear

    monkeypatch.setattr(linear, "unserved", lambda *tensors: None)
    grid = TokenGrid(6, 6)
    q, k, v, _ = inputs(grid)
    halves = Rotary(*(torch.ones(grid.tokens, 8) for _ in range(2)), blocks=2)
    why = create_attention("relu_linear").why_reference(q, k, v, grid, rotary=halves)
    assert why == "the kernel turns neighbouring channels, or halves of a power of two, of features as wide as the head"
