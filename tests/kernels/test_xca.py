"""The fused cross-covariance attention against the float64 reference, and how PyTorch may use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import Size, TokenGrid, create_attention
from linvit.kernels import xca as launch
from linvit.kernels.xca import split_of, why_not, xca
from tests.kernels.conftest import ON_GPU
from tests.kernels.quadratic_reference import draw, error

LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 8e-3}


def near(k: Tensor, q: Tensor, variant: str = "xcit") -> Tensor:
    """Keys that have something to do with the queries, so that the softmax is not flat; nor a single one."""
    return k + (2 if variant == "xcit" else 0.1) * q.roll(1, -1)


def check(q: Tensor, k: Tensor, v: Tensor, variant: str = "xcit", mask: Tensor | None = None) -> None:
    """Output and all gradients; masked tokens of q and k are poisoned for us and not for the truth."""
    limit = LIMITS[q.dtype]
    heads = q.shape[1]
    plain = create_attention("xca", variant=variant, heads=heads, impl="reference").to(q.device).double()
    grad = draw(q.device, q.dtype, *v.shape, seed=9)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    ours = [t.detach().requires_grad_() for t in (q, k, v)]
    if variant == "xcit":
        temperature = 3 + draw(q.device, torch.float32, heads, seed=4)
        plain.temperature.data.copy_(temperature)
        exact.append(plain.temperature)
        ours.append(temperature.requires_grad_())
    kept = [*exact[:2]] if mask is None else [torch.where(mask[:, None, :, None], t, 0.0) for t in exact[:2]]
    if mask is not None:
        for t in ours[:2]:
            t.data = t.data.masked_fill(~mask[:, None, :, None], float("nan"))
    scale = plain.temperature[:, None, None] if variant == "xcit" else 1.0
    if variant == "xcit":
        kept = [torch.nn.functional.normalize(t, dim=-2) for t in kept]
    elif mask is None:
        scale = q.shape[2] ** -0.5
    else:
        scale = mask.sum(-1).double()[:, None, None, None] ** -0.5
    truth = exact[2] @ (kept[0].mT @ kept[1] * scale).softmax(-1).mT
    if mask is None:
        assert error(plain(*exact[:3]), truth) < 1e-12
    truths = torch.autograd.grad(truth, exact, grad.double())
    out = xca(*ours[:3], *ours[3:], mask=mask)
    assert out.shape == truth.shape and out.dtype == q.dtype and out.transpose(1, 2).is_contiguous()
    assert error(out, truth) < limit
    for name, found, exactly in zip("qkvt", torch.autograd.grad(out, ours, grad), truths, strict=False):
        assert error(found, exactly) < limit, f"d{name}"


@pytest.mark.parametrize("variant", ["xcit", "fair"])
@pytest.mark.parametrize("tokens", [3, 7, 70])
def test_any_number_of_tokens(device: torch.device, tokens: int, variant: str) -> None:
    q, k, v = (draw(device, torch.float32, 1, 2, tokens, 16, seed=s) for s in range(3))
    check(q, near(k, q, variant), v, variant)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("dim", [1, 24, 64])
def test_any_width_and_type(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    q, k, v = (draw(device, dtype, 1, 2, 40, dim, seed=s) for s in range(3))
    check(q, near(k, q), v)


@pytest.mark.parametrize("dim", [72, 96, 128])
def test_wide_heads(device: torch.device, dim: int) -> None:
    """In two pieces, and in one of 128; heads side by side, as a projection leaves them."""
    q, k, v = (draw(device, torch.bfloat16, 1, 70, 1, dim, seed=s).transpose(1, 2) for s in range(3))
    check(q, near(k, q), v)


@pytest.mark.parametrize("variant", ["xcit", "fair"])
def test_key_mask_and_chunks(device: torch.device, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_of(6, 577, 64, 132) > 1 and split_of(384, 16384, 64, 132) == 1
    mask = draw(device, torch.float32, 2, 140) > -0.5
    mask[0, :80] = False
    q, k, v = (draw(device, torch.float32, 2, 1, 140, 16, seed=s) for s in range(3))
    check(q, near(k, q, variant), v, variant, mask)
    monkeypatch.setattr(launch, "split_of", lambda *_: 3)
    launch.prepare.cache_clear()
    check(q, near(k, q, variant), v, variant, mask)
    check(q, near(k, q, variant), v, variant)
    launch.prepare.cache_clear()


def test_a_channel_of_nothing(device: torch.device) -> None:
    q, k, v = (draw(device, torch.float32, 1, 1, 20, 8, seed=s).requires_grad_() for s in range(3))
    q.data[..., 3] = 0
    out = xca(q, k, v, torch.ones(1, device=device), eps=1e-3)
    (found,) = torch.autograd.grad(out.square().sum(), q)
    normal = [torch.nn.functional.normalize(t, dim=-2, eps=1e-3) for t in (q, k)]
    truth = v @ (normal[0].mT @ normal[1]).softmax(-1).mT
    (exactly,) = torch.autograd.grad(truth.square().sum(), q)
    assert error(out, truth) < 1e-5 and error(found, exactly) < 1e-4


def test_temperatures_of_any_type_that_learn_or_do_not(device: torch.device) -> None:
    """All are calls of one shape; another type is another kernel, and so is a gradient that is asked for."""
    tensors = [draw(device, torch.float32, 1, 2, 20, 8, seed=s).requires_grad_() for s in range(3)]
    tau = torch.tensor([0.5, 2.0], device=device)
    q, k = (torch.nn.functional.normalize(t, dim=-2) for t in tensors[:2])
    truth = tensors[2] @ (q.mT @ k * tau[:, None, None]).softmax(-1).mT
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for learns in (False, True):
            out = xca(*tensors, tau.to(dtype, copy=True).requires_grad_(learns))
            assert error(out, truth) < 1e-5
            assert len(torch.autograd.grad(out.sum(), tensors)) == 3


def test_packed_projection_gets_one_gradient(device: torch.device) -> None:
    packed = draw(device, torch.float32, 2, 21, 3, 2, 8).requires_grad_()
    tau = torch.ones(2, device=device)
    grad = draw(device, torch.float32, 2, 2, 21, 8)
    (found,) = torch.autograd.grad(xca(*packed.permute(2, 0, 3, 1, 4).unbind(0), tau), packed, grad)
    separate = [t.detach().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4).unbind(0)]
    parts = torch.autograd.grad(xca(*separate, tau), separate, grad)
    assert torch.equal(torch.stack(parts).permute(1, 3, 0, 2, 4), found)


def test_same_bits_every_time(device: torch.device) -> None:
    inputs = [draw(device, torch.float16, 1, 2, 70, 8, seed=s).requires_grad_() for s in range(3)]
    tau = torch.ones(2, device=device).requires_grad_()

    def run() -> tuple[Tensor, ...]:
        out = xca(*inputs, tau)
        return (out, *torch.autograd.grad(out, (*inputs, tau), torch.ones_like(out)))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_opcheck(device: torch.device) -> None:
    inputs = [draw(device, torch.float32, 1, 2, 9, 8, seed=s).requires_grad_() for s in range(3)]
    tau = torch.ones(2, device=device).requires_grad_()
    torch.library.opcheck(torch.ops.linvit.xca.default, (*inputs, None, tau, True, 1e-12, True))


def test_compiles_and_counts(device: torch.device) -> None:
    inputs = [draw(device, torch.float32, 1, 2, 17, 8, seed=s).requires_grad_() for s in range(3)]
    plain = torch.autograd.grad(xca(*inputs).square().sum(), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(xca, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))
    grid = TokenGrid.line(17)
    with FlopCounterMode(display=False) as counter:
        xca(*inputs)
    mechanism = create_attention("xca", heads=2)
    assert counter.get_total_flops() == 2 * mechanism.macs(Size(1, 2, 8, 8, grid, grid))


@pytest.mark.parametrize("variant", ["xcit", "fair"])
def test_the_mechanism_uses_it(device: torch.device, variant: str) -> None:
    q, k, v = (draw(device, torch.float32, 2, 2, 20, 8, seed=s) for s in range(3))
    mask = draw(device, torch.float32, 2, 20) > -0.5
    fused = create_attention("xca", heads=2, variant=variant).to(device)
    plain = create_attention("xca", heads=2, variant=variant, impl="reference").to(device)
    fused.impl = "triton"
    assert error(fused(q, k, v), plain(q, k, v)) < 1e-5
    assert error(fused(q, k, v, mask=mask), plain(q, k, v, mask=mask)) < 1e-5
    wide = torch.zeros(1, 2, 5, 160, device=device)
    assert "wider than 64" in (why_not(wide, wide, wide) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("batch, heads, dim, tokens", [(2, 6, 64, 785), (1, 12, 80, 4097), (64, 3, 64, 197)])
def test_real_sizes(device: torch.device, batch: int, heads: int, dim: int, tokens: int) -> None:
    q, k, v = (draw(device, torch.bfloat16, batch, heads, tokens, dim, seed=s) for s in range(3))
    check(q, near(k, q), v)
