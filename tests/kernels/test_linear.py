"""The fused linear attention against float64: outputs, all gradients, and how PyTorch may use it."""

from __future__ import annotations

from functools import partial, partialmethod
from math import pi
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from linvit.errors import LinvitError
from linvit.kernels import linear_launch, linear_plan
from linvit.kernels.linear import Formula, attend, linear_attention, linear_attention_packed, packed_source, why_not
from tests.kernels.conftest import ON_GPU

FORMULAS = {
    "stella": Formula("relu", scale=0.01),
    "relu": Formula("relu", row_sum=True, eps=1e-6),
    "cosformer": Formula("relu", row_sum=True, clamp=True, eps=1e-6),
    "elu": Formula("elu_plus_one", row_sum=True, eps=1e-6),
    "sigmoid": Formula("sigmoid", row_sum=True),
    "angular": Formula("direction", scale=1 / pi, feature_eps=1e-6, own=0.5, norm=True, norm_eps=1e-6),
    "qt": Formula("square", row_sum=True, eps=1e-15, feature_eps=1e-15),
    "identity": Formula("identity", scale=0.1),
}
every = pytest.mark.parametrize("name", FORMULAS)
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)


def reference(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None
) -> Tensor:
    """The formula as it is written, in the dtype it gets."""
    features = {
        "relu": torch.relu,
        "elu_plus_one": lambda x: F.elu(x) + 1,
        "sigmoid": torch.sigmoid,
        "direction": lambda x: F.normalize(x, dim=-1, eps=formula.feature_eps),
        "square": lambda x: F.normalize(x**2, dim=-1, eps=1e-300),
        "identity": lambda x: x,
    }
    phi_q, phi_k = features[formula.feature](q), features[formula.feature](k)
    keys: int | Tensor = k.shape[2]
    if mask is not None:
        keep = mask[:, None, :, None]
        phi_k, v, keys = torch.where(keep, phi_k, 0), torch.where(keep, v, 0), keep.sum(2, keepdim=True)
    out = phi_q @ (phi_k.transpose(-2, -1) @ v)
    if constant is not None:
        out = out + constant * v.sum(2, keepdim=True)
    if formula.row_sum:
        total = phi_q @ phi_k.sum(2).unsqueeze(-1)
        if constant is not None:
            total = total + constant * keys
        out = out / (total.clamp_min(formula.eps) if formula.clamp else total + formula.eps)
    out = out * formula.scale
    if formula.own:
        out = out + formula.own * v
    return F.normalize(out, dim=-1, eps=formula.norm_eps) if formula.norm else out


def error(found: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp_min(least))


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)


def inputs(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, queries: int, dim: int,
    keys: int | None = None, value_dim: int | None = None,
) -> list[Tensor]:  # fmt: skip
    keys, value_dim = keys or queries, value_dim or dim
    shapes = ((queries, dim), (keys, dim), (keys, value_dim))
    return [draw(device, dtype, batch, heads, *s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def compare(name: str, tensors: list[Tensor], mask: Tensor | None = None) -> None:
    """Output and gradients within the promised distance of float64."""
    formula, dtype = FORMULAS[name], tensors[0].dtype
    constant = torch.tensor(0.7, device=tensors[0].device, requires_grad=True) if name == "qt" else None
    leaves = [*tensors, constant] if constant is not None else tensors
    out = linear_attention(*tensors, formula, mask, constant)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact = reference(*exact_leaves[:3], formula, mask, exact_leaves[3] if constant is not None else None)
    grad = draw(out.device, dtype, *out.shape, seed=7)
    found, wanted = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(exact, exact_leaves, grad.double())
    assert out.dtype == dtype and out.shape == exact.shape
    assert error(out, exact) < (5e-3 if dtype in HALF else 1e-5)
    for letter, one, other in zip(("dq", "dk", "dv", "dc"), found, wanted, strict=False):
        # With one key or one feature a row sum leaves nothing of dq and dk: that nothing is held to d out instead.
        least = 1e-3 * float(grad.norm())
        assert error(one, other, least) < (1e-2 if dtype in HALF else 1e-4), letter


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_formula(name: str, dtype: torch.dtype, device: torch.device) -> None:
    compare(name, inputs(device, dtype, 2, 3, 70, 16))


@every
def test_mask_odd_width_and_ragged_heads(name: str, device: torch.device) -> None:
    mask = draw(device, torch.float32, 2, 33) > -0.5
    mask[:, 0] = True
    compare(name, inputs(device, torch.float32, 2, 3, 33, 5), mask)


@pytest.mark.parametrize("name", ["stella", "relu", "qt"])
@pytest.mark.parametrize("queries, keys, dim, value_dim", [(40, 17, 12, 20), (9, 50, 33, 7)])
def test_pooled_keys_and_wide_values(
    name: str, queries: int, keys: int, dim: int, value_dim: int, device: torch.device
) -> None:
    compare(name, inputs(device, torch.float32, 1, 2, queries, dim, keys, value_dim))


@pytest.mark.parametrize("name", ["stella", "relu", "angular"])
@pytest.mark.parametrize("tokens", [1, 7, 49, 63, 197])
def test_odd_numbers_of_tokens(name: str, tokens: int, device: torch.device) -> None:
    compare(name, inputs(device, torch.float32, 1, 1, tokens, 8))


@pytest.mark.parametrize("name", ["relu", "qt"])
@pytest.mark.parametrize("dim, value_dim", [(1, 1), (2, 3), (96, 96), (130, 200), (256, 256)])
def test_widths_of_heads(name: str, dim: int, value_dim: int, device: torch.device) -> None:
    compare(name, inputs(device, torch.float32, 1, 2, 20, dim, value_dim=value_dim))


@every
@pytest.mark.parametrize("saved", [False, True])
def test_tokens_split_over_programs(
    name: str, saved: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way with partial states, at a size that would not take it."""
    monkeypatch.setattr(linear_plan, "SMALL", 16)
    monkeypatch.setattr(linear_launch, "remembered", {})
    monkeypatch.setattr(linear_launch, "keeps_state", lambda q, v: saved)
    compare(name, inputs(device, torch.float32, 1, 2, 300, 8))


@every
def test_a_saved_state_gives_the_same_gradients(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_launch, "remembered", {})
    monkeypatch.setattr(linear_launch, "keeps_state", lambda q, v: True)
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
        attend(*qkv.permute(2, 0, 3, 1, 4).unbind(0), FORMULAS["relu"])
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
        assert torch.equal(out, linear_attention(*(t.contiguous() for t in tensors), formula))
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
    packed = linear_attention_packed(qkv.view(2, 24, 3, 2, 8), formula)
    outs = (attend(q, k, v, formula), packed, linear_attention(q, k, v, formula))
    whole, direct, stacked = (torch.autograd.grad(o.sin().sum(), flat, retain_graph=True)[0] for o in outs)
    assert torch.equal(whole, stacked) and torch.equal(direct, stacked)
    q.retain_grad()
    assert packed_source(q, k, v) is None


def test_refuses_a_second_derivative(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 1, 1, 9, 8)
    out = linear_attention(*tensors, FORMULAS["stella"])
    with pytest.raises(LinvitError, match="twice"):
        torch.autograd.grad(out.sum(), tensors, create_graph=True)


def test_same_bits_twice(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 1, 2, 200, 8)

    def run() -> list[Tensor]:
        out = linear_attention(*tensors, FORMULAS["elu"])
        return [out, *torch.autograd.grad(out.sin().sum(), tensors)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_nan_shows(device: torch.device) -> None:
    q, k, v = (t.detach() for t in inputs(device, torch.float32, 1, 1, 20, 8))
    q[0, 0, 3, 2] = float("nan")
    out = linear_attention(q, k, v, FORMULAS["stella"])
    assert out[0, 0, 3].isnan().all() and out.isnan().sum() == 8


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool, device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 2, 2, 20, 8)
    mask, constant = draw(device, torch.float32, 2, 20) > 0, torch.tensor(0.5, device=device, requires_grad=True)
    rest = (mask, constant, *FORMULAS["qt"], True)
    if packed:
        qkv = draw(device, torch.float32, 2, 20, 3, 2, 8).requires_grad_()
        torch.library.opcheck(torch.ops.linvit.linear_attention_packed.default, (qkv, *rest))
    else:
        torch.library.opcheck(torch.ops.linvit.linear_attention.default, (*tensors, *rest))


def test_compiles_as_one_graph(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 2, 2, 20, 8)
    torch._dynamo.reset()
    backend = "inductor" if ON_GPU else "aot_eager"
    compiled = torch.compile(
        lambda q, k, v: linear_attention(q, k, v, FORMULAS["elu"]) * 2, fullgraph=True, backend=backend
    )
    found = torch.autograd.grad(compiled(*tensors).sin().sum(), tensors)
    wanted = torch.autograd.grad((linear_attention(*tensors, FORMULAS["elu"]) * 2).sin().sum(), tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


class Packed(torch.nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        return linear_attention_packed(qkv, FORMULAS["relu"])


def test_exports_with_any_number_of_tokens(device: torch.device) -> None:
    qkv, more = draw(device, torch.float32, 2, 20, 3, 2, 8), draw(device, torch.float32, 2, 31, 3, 2, 8)
    shapes = {"qkv": {1: torch.export.Dim("tokens", min=2, max=4096)}}
    exported = torch.export.export(Packed(), (qkv,), dynamic_shapes=shapes).module()
    assert torch.equal(exported(more), Packed()(more))


def test_autocast_and_checkpointing(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 1, 2, 20, 8)
    formula = FORMULAS["relu"]
    plain = torch.autograd.grad(linear_attention(*tensors, formula).sin().sum(), tensors)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = linear_attention(*tensors, formula)
    assert out.dtype == torch.float32
    again = checkpoint(lambda *t: linear_attention(*t, formula), *tensors, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(again.sin().sum(), tensors), plain, strict=True):
        assert torch.equal(one, other)


def test_flops_are_those_of_the_reference(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 2, 2, 20, 8, 12, 4)
    counts = []
    for run in (linear_attention, reference):
        with FlopCounterMode(display=False) as counter:
            run(*tensors, FORMULAS["relu"])
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_says_why_it_cannot(device: torch.device) -> None:
    q, k, v = (t.detach() for t in inputs(device, torch.float32, 1, 2, 20, 8))
    formula = FORMULAS["relu"]
    assert why_not(q, k, v, formula) is None
    assert "float64" in str(why_not(q.double(), k.double(), v.double(), formula))
    assert "different types" in str(why_not(q, k, v.half(), formula))
    assert "too wide" in str(why_not(*(t.new_zeros(1, 1, 4, 600) for t in (q, k, v)), formula))
    assert "feature map" in str(why_not(q, k, v, formula._replace(feature="cosine")))
    assert "as many keys" in str(why_not(q, k[:, :, :9], v[:, :, :9], FORMULAS["angular"]))
    assert "empty" in str(why_not(q[:, :, :0], k, v, formula))


def test_few_ways_to_lay_out_heads() -> None:
    for heads, dim, value_dim in ((3, 1, 1), (6, 64, 64), (12, 32, 128), (5, 256, 256), (1, 3, 300), (64, 2, 2)):
        for itemsize in (2, 4):
            layout = linear_plan.layout_of(heads, dim, value_dim, itemsize)
            assert layout.key_width >= dim and layout.value_width * layout.value_blocks >= value_dim
            assert layout.group * min(layout.key_width, layout.value_width) >= 16
            assert layout.numbers % 16 == 0


@pytest.mark.gpu
@every
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tokens", [785, 1025, 12545])
def test_real_sizes(name: str, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    qkv = draw(device, dtype, 2, tokens, 3, 3, 64).requires_grad_()
    compare(name, list(qkv.permute(2, 0, 3, 1, 4).unbind(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim, value_dim", [(2, 2), (24, 24), (32, 64), (96, 96), (128, 128), (192, 256), (384, 64)])
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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 3, 196, 64), (8, 6, 784, 32), (1, 3, 4096, 64), (64, 6, 196, 64)])
def test_replays_from_a_graph(shape: tuple[int, ...], device: torch.device) -> None:
    tensors = inputs(device, torch.bfloat16, *shape)

    def run() -> list[Tensor]:
        out = linear_attention(*tensors, FORMULAS["relu"])
        return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))
