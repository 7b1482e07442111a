"""The fused linear attention against float64: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from linvit.kernels import linear as launch
from linvit.kernels.fused import packed_source
from linvit.kernels.linear import Formula, layout, linear_attention, op
from tests.kernels.linear_reference import DTYPES, FORMULAS, HALF, compare, draw, error, every, inputs, reference


@pytest.fixture
def no_launches() -> Iterator[None]:
    """What a test changes about launches holds for its own only."""
    launch.prepare.cache_clear()
    yield
    launch.prepare.cache_clear()


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_formula(name: str, dtype: torch.dtype, device: torch.device) -> None:
    compare(name, inputs(device, dtype, 1, 3, 70, 16))


@every
def test_mask_odd_width_and_ragged_heads(name: str, device: torch.device) -> None:
    mask = draw(device, torch.float32, 2, 33) > -0.5
    mask[:, 0] = True
    compare(name, inputs(device, torch.float32, 2, 3, 33, 5), mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [0, 64])
def test_keys_far_above_those_of_the_first_tile(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """A softmax over tokens whose exponents would overflow without the largest of all; or the first tile is masked."""
    q, k, v = inputs(device, dtype, 1, 2, 150, 16)
    with torch.no_grad():
        k[..., 140:, :3] += 95
        k[..., 70:80, 3] += 30
    mask = None
    if hidden:
        mask = torch.arange(150, device=device)[None] >= hidden
    compare("efficient", [q, k, v], mask)


@pytest.mark.parametrize("name", ["stella", "relu", "qt"])
@pytest.mark.parametrize("queries, keys, dim, value_dim", [(40, 17, 12, 20), (9, 50, 33, 7)])
def test_pooled_keys_and_wide_values(
    name: str, queries: int, keys: int, dim: int, value_dim: int, device: torch.device
) -> None:
    compare(name, inputs(device, torch.float32, 1, 2, queries, dim, keys, value_dim))


@pytest.mark.parametrize("name", ["stella", "relu", "angular"])
@pytest.mark.parametrize("tokens", [1, 63, 197])
def test_odd_numbers_of_tokens(name: str, tokens: int, device: torch.device) -> None:
    compare(name, inputs(device, torch.float32, 1, 1, tokens, 8))


@pytest.mark.parametrize("name", ["relu", "qt"])
@pytest.mark.parametrize("dim, value_dim", [(1, 1), (2, 3), (130, 200), (256, 256)])
def test_widths_of_heads(name: str, dim: int, value_dim: int, device: torch.device) -> None:
    compare(name, inputs(device, torch.float32, 1, 2, 20, dim, value_dim=value_dim))


@every
@pytest.mark.parametrize("dim, value_dim", [(80, 72), (64, 96)])
def test_heads_in_two_pieces(name: str, dim: int, value_dim: int, device: torch.device) -> None:
    """Tiles of 64 channels and of the rest."""
    compare(name, inputs(device, torch.float32, 1, 1, 35, dim, value_dim=value_dim))
    assert layout.layout_of(1, dim, value_dim, 4).values == (80 if value_dim < 96 else 96)


@pytest.mark.parametrize("name", ["stella", "relu"])
def test_two_pieces_split_over_programs_in_half_precision(
    name: str, device: torch.device, no_launches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SMALL", 16)
    compare(name, inputs(device, torch.bfloat16, 1, 1, 140, 96, value_dim=72))


@every
@pytest.mark.parametrize("saved", [False, True])
def test_tokens_split_over_programs(
    name: str, saved: bool, device: torch.device, no_launches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way with partial states, at a size that would not take it."""
    monkeypatch.setattr(layout, "SMALL", 16)
    monkeypatch.setattr(launch, "keeps_state", lambda *_: saved)
    compare(name, inputs(device, torch.float32, 1, 2, 100, 8))


@every
def test_a_saved_state_gives_the_same_gradients(
    name: str, device: torch.device, no_launches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "keeps_state", lambda *_: True)
    compare(name, inputs(device, torch.float32, 2, 3, 40, 8))


@pytest.mark.parametrize("tokens", [40, 1100, 1400])
def test_saves_no_more_than_softmax_does(tokens: int, device: torch.device) -> None:
    """Beside the packed projection: at most one float32 number for each query and head, softmax's row sums."""
    qkv = draw(device, torch.float32, 1, tokens, 3, 1, 32).requires_grad_()
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), FORMULAS["relu"])
    assert sum(kept.values()) - qkv.untyped_storage().nbytes() == (1120 * 4 if tokens == 1400 else 0)


@pytest.mark.parametrize("masked", [False, True])
def test_everything_is_written(masked: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No output keeps what was in memory before: with every buffer full of NaN nothing changes."""
    tensors = inputs(device, torch.float32, 2, 3, 37, 5)
    mask = draw(device, torch.float32, 2, 37) > 0 if masked else None

    def run() -> list[Tensor]:
        out = linear_attention(*tensors, FORMULAS["angular"], mask)
        return [out, *torch.autograd.grad(out.sin().sum(), tensors)]

    clean = run()

    def poisoned(make: Any, *args: Any, **options: Any) -> Tensor:
        return make(*args, **options).fill_(float("nan"))

    for name in ("empty", "empty_strided", "empty_like"):
        monkeypatch.setattr(torch, name, partial(poisoned, getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", partialmethod(partial(poisoned, Tensor.new_empty)))
    for found, wanted in zip(run(), clean, strict=True):
        assert torch.equal(found, wanted)


def test_any_strides(device: torch.device) -> None:
    formula = FORMULAS["relu"]
    wide = draw(device, torch.float32, 2, 24, 3, 2, 20)
    q, k, v = (wide[..., ::2].permute(2, 0, 3, 1, 4)[i] for i in range(3))
    channels_first = draw(device, torch.float32, 2, 2, 8, 24).transpose(2, 3)
    expanded = draw(device, torch.float32, 1, 1, 24, 8).expand(2, 2, 24, 8)
    for tensors in ((q, k, v), (channels_first, expanded, channels_first.flip(2))):
        out = linear_attention(*tensors, formula)
        # On a GPU reads of another width lay a tile out differently, and a row's sum has another order.
        assert error(out, linear_attention(*(t.contiguous() for t in tensors), formula)) <= (1e-6 if out.is_cuda else 0)
        assert out.transpose(1, 2).is_contiguous()


def test_gradient_of_an_expanded_gradient(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 1, 2, 20, 8)
    linear_attention(*tensors, FORMULAS["stella"]).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in tensors]
    reference(*exact, FORMULAS["stella"]).sum().backward()
    assert all(error(t.grad, e.grad) < 1e-5 for t, e in zip(tensors, exact, strict=True))


def test_packed_projection_gets_a_packed_gradient(device: torch.device) -> None:
    formula = FORMULAS["elu"]
    flat = draw(device, torch.float32, 2, 24, 3 * 2 * 8).requires_grad_()
    qkv = flat * 1.0
    q, k, v = qkv.reshape(2, 24, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    assert packed_source(q, v, k) is None and packed_source(q.detach(), k, v) is None
    assert packed_source(q, k, v) is qkv
    separate = [t.detach().requires_grad_() for t in (q, k, v)]
    stacked = torch.autograd.grad(linear_attention(*separate, formula).sin().sum(), separate)
    wanted = torch.stack(stacked).permute(1, 3, 0, 2, 4).reshape(flat.shape)
    for out in (linear_attention(q, k, v, formula), op.packed(qkv.view(2, 24, 3, 2, 8), (None,) * 6, formula)):
        flat.grad = None
        out.sin().sum().backward(retain_graph=True)
        assert torch.equal(flat.grad, wanted)


def test_same_bits_twice(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 1, 2, 70, 8)

    def run() -> list[Tensor]:
        out = linear_attention(*tensors, FORMULAS["elu"])
        return [out, *torch.autograd.grad(out.sin().sum(), tensors)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_nan_shows(device: torch.device) -> None:
    q, k, v = (t.detach() for t in inputs(device, torch.float32, 1, 1, 20, 8))
    q[0, 0, 3, 2] = float("nan")
    out = linear_attention(q, k, v, FORMULAS["stella"])
    assert out[0, 0, 3].isnan().all() and out.isnan().sum() == 8


@pytest.mark.gpu
@every
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tokens", [785, 1025, 12545])
def test_real_sizes(name: str, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    qkv = draw(device, dtype, 2, tokens, 3, 3, 64).requires_grad_()
    compare(name, list(qkv.permute(2, 0, 3, 1, 4).unbind(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "dim, value_dim", [(2, 2), (24, 24), (32, 64), (72, 80), (96, 96), (128, 128), (192, 256), (384, 64)]
)
@pytest.mark.parametrize("name", ["relu", "identity"])
def test_real_widths(name: str, dtype: torch.dtype, dim: int, value_dim: int, device: torch.device) -> None:
    if dim > 256 and dtype == torch.float32:
        pytest.skip("not served")
    compare(name, inputs(device, dtype, 2, 3, 197, dim, value_dim=value_dim))


@pytest.mark.gpu
def test_a_million_tokens_and_offsets_past_32_bits(device: torch.device) -> None:
    qkv = torch.randn(1, 2**20, 3, 12, 64, device=device, dtype=torch.bfloat16).mul_(4).requires_grad_()
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    out = linear_attention(q, k, v, Formula("relu", row_sum=True, eps=1e-6))
    phi_k = k[:, -1].float().relu()
    exact = q[:, -1, -5:].float().relu() @ (phi_k.mT @ v[:, -1].float())
    exact = exact / (q[:, -1, -5:].float().relu() @ phi_k.sum(1).unsqueeze(-1) + 1e-6)
    assert error(out[:, -1, -5:], exact) < 5e-3
    (grad,) = torch.autograd.grad(out[:, :, -5:].float().sum(), qkv)
    assert grad.isfinite().all() and grad[:, -5:, 0].abs().sum() > 0 and grad[:, :, 2].abs().sum() > 0
