"""The fused angular attention against float64, and how PyTorch may use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import create_attention
from linvit.clock import peak_memory
from linvit.kernels import angular as launch
from linvit.kernels.angular import angular, why_not
from linvit.kernels.fused import unpack
from tests.kernels.conftest import ON_GPU
from tests.kernels.quadratic_reference import draw, error

# Relative RMS of output and gradients; the interpreter cuts float32 to bfloat16 where the GPU rounds.
LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
EPS = 1e-6


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    cosine = F.normalize(q, dim=-1, eps=EPS) @ F.normalize(k, dim=-1, eps=EPS).mT
    weight = 1 - cosine.clamp(-1 + 1e-7, 1 - 1e-7).acos() / torch.pi
    if mask is not None:
        weight = torch.where(mask[:, None, None, :], weight, 0)
    return weight @ v / (weight.sum(-1, keepdim=True) + EPS)


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
    """Output and all gradients against float64; masked keys and values are poisoned for us and not for the truth."""
    limit = LIMITS[q.dtype]
    grad = draw(q.device, q.dtype, *q.shape[:3], v.shape[3], seed=9)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = reference(*exact, mask)
    truths = torch.autograd.grad(truth, exact, grad.double())
    ours = [t.detach().requires_grad_() for t in (q, k, v)]
    if mask is not None:
        for t in ours[1:]:
            t.data = t.data.masked_fill(~mask[:, None, :, None], float("nan"))
    out = angular(*ours, mask)
    assert out.shape == truth.shape and out.dtype == q.dtype and out.transpose(1, 2).is_contiguous()
    assert error(out, truth) < limit
    for name, found, exactly in zip("qkv", torch.autograd.grad(out, ours, grad), truths, strict=True):
        assert found.shape == exactly.shape and error(found, exactly) < limit, f"d{name}"


def three(device: torch.device, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [draw(device, dtype, *shape, seed=s) for s in range(3)]


@pytest.mark.parametrize("tokens", [2, 7, 49, 65, 197])
def test_any_number_of_tokens(device: torch.device, tokens: int) -> None:
    check(*three(device, torch.float32, 1, 2, tokens, 16))


def test_one_key_has_all_the_weight(device: torch.device) -> None:
    q, k, v = (t.requires_grad_() for t in three(device, torch.float32, 1, 2, 1, 16))
    out = angular(q, k, v)
    assert error(out, v) < 1e-5
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4 and error(dv, torch.ones_like(v)) < 1e-5


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("dim, value_dim", [(16, 3), (32, 64), (64, 32), (72, 96)])
def test_any_width_and_type(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    q, k = (draw(device, dtype, 1, 2, 70, dim, seed=s) for s in range(2))
    check(q, k, draw(device, dtype, 1, 2, 70, value_dim, seed=2))


@pytest.mark.parametrize("queries, keys", [(130, 7), (5, 140)])
def test_keys_and_queries_may_differ_in_number(device: torch.device, queries: int, keys: int) -> None:
    q = draw(device, torch.float32, 2, 1, queries, 16)
    check(q, *(draw(device, torch.float32, 2, 1, keys, 16, seed=s) for s in (1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [40, 70])
def test_key_mask(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """One image has no key left."""
    mask = draw(device, torch.float32, 3, tokens) > -0.5
    mask[1] = False
    check(*three(device, dtype, 3, 1, tokens, 16), mask)


@pytest.mark.parametrize("dtype, exponents", [(torch.float32, (-15, 15)), (torch.float16, (-6, 9))], ids=str)
def test_tokens_of_any_length(device: torch.device, dtype: torch.dtype, exponents: tuple[int, int]) -> None:
    """The angle does not know of lengths, the gradients are the larger the shorter a token is."""
    q, k, v = three(device, torch.float32, 1, 2, 70, 16)
    lengths = torch.arange(70, device=device)[:, None] % (exponents[1] - exponents[0]) + exponents[0]
    q, k = ((t.to(dtype) * 2.0**lengths).to(dtype) for t in (q, k.flip(2)))
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    ours = [t.requires_grad_() for t in (q, k)]
    truth, out = reference(*exact, v.to(dtype).double()), angular(*ours, v.to(dtype))
    assert error(out, truth) < LIMITS[dtype]
    truths, found = (torch.autograd.grad(o.sum(), of) for o, of in ((truth, exact), (out, ours)))
    for ours_, exactly in zip(found, truths, strict=True):
        assert error(ours_.double() * 2.0**lengths, exactly * 2.0**lengths) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_equal_opposite_and_zero_tokens(device: torch.device, dtype: torch.dtype) -> None:
    """Where the slope of the angle is infinite, and where there is no angle."""
    q, k, v = three(device, dtype, 1, 2, 70, 32)
    k[:, :, :20], k[:, :, 20:40] = q[:, :, :20], -q[:, :, 20:40]
    exact, ours = ([t.to(kind).detach().requires_grad_() for t in (q, k, v)] for kind in (torch.float64, dtype))
    truth, out = reference(*exact), angular(*ours)
    assert error(out, truth) < max(LIMITS[dtype], 1e-4)
    truths, found = (torch.autograd.grad(o.sum(), of) for o, of in ((truth, exact), (out, ours)))
    assert all(error(a, b) < max(LIMITS[dtype], 2e-3) for a, b in zip(found, truths, strict=True))
    for zero in ("q", "k", "qk", "v"):
        given = [(t * (name not in zero)).requires_grad_() for name, t in zip("qkv", (q, k, v), strict=True)]
        given[1].data[:, :, 3:9] = 0
        out = angular(*given)
        assert error(out, reference(*(t.double() for t in given))) < LIMITS[dtype]
        found = torch.autograd.grad(out.sum(), given)
        assert not any(g.isnan().any() for g in found) and found[2].isfinite().all()


def test_a_packed_projection_gets_one_gradient(device: torch.device) -> None:
    packed = draw(device, torch.float32, 2, 35, 3, 2, 16).requires_grad_()
    grad = draw(device, torch.float32, 2, 2, 35, 16)
    (found,) = torch.autograd.grad(angular(*unpack(packed)), packed, grad)
    exact = packed.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(reference(*unpack(exact)), exact, grad.double())
    assert error(found, truth) < 2e-5
    separate = [t.detach().requires_grad_() for t in unpack(packed)]
    parts = torch.autograd.grad(angular(*separate), separate, grad)
    assert torch.equal(torch.stack(parts).permute(1, 3, 0, 2, 4), found)


def test_odd_strides_and_poisoned_surroundings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that are read; and all that is written is written whole."""
    rows_like = launch.rows_like
    monkeypatch.setattr(launch, "rows_like", lambda *a: rows_like(*a).fill_(float("nan")))
    wide = torch.full((2, 80, 2, 40), float("nan"), device=device)
    wide[:, :77, :, 3:35:2] = draw(device, torch.float32, 2, 77, 2, 16)
    q = wide[:, :77, :, 3:35:2].transpose(1, 2)
    assert q.stride(-1) == 2
    check(q, q.flip(2).transpose(2, 3).contiguous().transpose(2, 3) + 0.1, q * 2)


def test_same_bits_every_time(device: torch.device) -> None:
    inputs = [t.requires_grad_() for t in three(device, torch.float16, 2, 2, 130, 16)]

    def run() -> tuple[Tensor, ...]:
        out = angular(*inputs)
        return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("tokens", [19, 70])
def test_opcheck(device: torch.device, tokens: int) -> None:
    """With the keys measured in the programs, and before."""
    inputs = [t.requires_grad_() for t in three(device, torch.float32, 1, 2, tokens, 8)]
    mask = draw(device, torch.float32, 1, tokens) > 0
    torch.library.opcheck(torch.ops.linvit.angular.default, (*inputs, mask, EPS, True))
    packed = draw(device, torch.float32, 1, tokens, 3, 2, 8).requires_grad_()
    torch.library.opcheck(torch.ops.linvit.angular_packed.default, (packed, None, EPS, True))


def test_compiles_and_counts(device: torch.device) -> None:
    inputs = [t.requires_grad_() for t in three(device, torch.float32, 1, 2, 70, 16)]
    plain = torch.autograd.grad(angular(*inputs).square().sum(), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(angular, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))
    with FlopCounterMode(display=False) as counter:
        angular(*inputs).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 70 * 70 * (2 + 5) * 16


@pytest.mark.parametrize("variant", ["row_sum", "output_norm"])
def test_the_mechanism_uses_it_or_says_why_not(device: torch.device, variant: str) -> None:
    q, k, v = three(device, torch.float32, 2, 2, 20, 8)
    mask = torch.ones(2, 20, dtype=torch.bool, device=device)
    mask[0, 5:], mask[1] = False, False
    plain = create_attention("angular", variant=variant, impl="reference")
    fused = create_attention("angular", variant=variant, impl="triton")
    for keep in (None, mask):
        ours, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
        out, truth = fused(*ours, mask=keep), plain(*theirs, mask=keep)
        assert error(out, truth) < 1e-5
        grad = draw(device, torch.float32, *out.shape, seed=5)
        found, exact = (torch.autograd.grad(o, of, grad) for o, of in ((out, ours), (truth, theirs)))
        assert all(error(a, b) < 1e-4 for a, b in zip(found, exact, strict=True))
    assert fused.why_reference(q, k, v) is None
    assert "wider than 256" in (why_not(*(torch.empty(1, 1, 2, 257, device=device) for _ in range(3))) or "")
    assert "float64" in (fused.why_reference(q.double(), k.double(), v.double()) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [785, 1025, 3137])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_real_sizes(device: torch.device, tokens: int, dim: int, dtype: torch.dtype) -> None:
    check(*three(device, dtype, 2, 3, tokens, dim))


@pytest.mark.gpu
def test_memory_is_linear(device: torch.device) -> None:
    def peak(tokens: int) -> int:
        packed = torch.randn(1, tokens, 3, 6, 64, device=device, dtype=torch.bfloat16).requires_grad_()
        return peak_memory(lambda: angular(*unpack(packed)).sum().backward(), device)

    assert peak(8192) < 2.2 * peak(4096)
