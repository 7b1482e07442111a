"""The fused Mobile-Attention against the float64 reference, and how PyTorch may use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import Size, TokenGrid, create_attention
from linvit.errors import LinvitError
from linvit.kernels import mobile as launches
from linvit.kernels.mobile import cut_of, mobile, together_of, why_not
from tests.kernels.conftest import ON_GPU

LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 6e-3}
VARIANTS = ("poster", "released")


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(device=device, dtype=dtype)


def check(
    q: Tensor, k: Tensor, v: Tensor, small: int, variant: str, mask: Tensor | None = None, limit: float | None = None
) -> None:
    """Output and all gradients; masked values are poisoned for us and not for the truth."""
    limit = limit or LIMITS[q.dtype]
    plain = create_attention("mobile", variant=variant, small_head_dim=small, impl="reference")
    grad = draw(q.device, q.dtype, *q.shape[:3], v.shape[3], seed=9)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = plain(*exact, mask=mask)
    truths = torch.autograd.grad(truth, exact, grad.double())
    ours = [t.detach().requires_grad_() for t in (q, k, v)]
    if mask is not None:
        ours[2].data = ours[2].data.masked_fill(~mask[:, None, :, None], float("nan"))
    # A padded query sees its own key; the mechanism hands the kernel zeros for those.
    kept = ours[1] if mask is None else torch.where(mask[:, None, :, None], ours[1], 0.0)
    out = mobile(ours[0], kept, ours[2], small, released=variant == "released", mask=mask)
    assert out.shape == truth.shape and out.dtype == q.dtype and out.transpose(1, 2).is_contiguous()
    assert error(out, truth) < limit
    for name, found, exactly in zip("qkv", torch.autograd.grad(out, ours, grad), truths, strict=True):
        assert error(found, exactly) < limit, f"d{name}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 7, 63])
def test_any_number_of_tokens(device: torch.device, tokens: int, variant: str) -> None:
    check(*(draw(device, torch.float32, 1, 2, tokens, 8, seed=s) for s in range(3)), 2, variant)


@pytest.mark.parametrize("small, variant", [(1, "poster"), (2, "released"), (4, "poster"), (8, "released")])
@pytest.mark.parametrize("heads, dim", [(3, 8), (5, 16)])
def test_any_number_of_small_heads(device: torch.device, heads: int, dim: int, small: int, variant: str) -> None:
    check(*(draw(device, torch.float32, 1, heads, 20, dim, seed=s) for s in range(3)), small, variant)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_any_type(device: torch.device, dtype: torch.dtype) -> None:
    check(*(draw(device, dtype, 1, 3, 37, 16, seed=s) for s in range(3)), 2, "poster")


@pytest.mark.parametrize("value_dim", [4, 16])
def test_values_of_another_width(device: torch.device, value_dim: int) -> None:
    q, k = (draw(device, torch.float32, 1, 2, 19, 8, seed=s) for s in range(2))
    check(q, k, draw(device, torch.float32, 1, 2, 19, value_dim, seed=2), 2, "poster")


@pytest.fixture(params=[True, False], ids=["together", "apart"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Flows and keys in one launch, or in two as where a token has too many channels."""
    if not request.param:
        monkeypatch.setattr(launches, "TOGETHER", (0, 0))
    launches.prepare_forward.cache_clear()
    yield request.param
    launches.prepare_forward.cache_clear()


@pytest.mark.parametrize("variant", VARIANTS)
def test_key_mask_and_chunks(device: torch.device, variant: str, together: bool) -> None:
    """Enough tokens for several chunks, some of them without a single key."""
    mask = draw(device, torch.float32, 2, 140) > -0.5
    mask[0, :80] = False
    check(*(draw(device, torch.float32, 2, 1, 140, 8, seed=s) for s in range(3)), 2, variant, mask)
    cut = cut_of(2, 8, 8, 140, 2, 4)
    found = together_of(cut, 2, 8, 140, 4)
    assert cut.chunks > 1 and (found is not None and found[0].chunks > 2 if together else found is None)


@pytest.mark.parametrize("tokens, begin", [(12, 0), (40, 32)], ids=["everywhere", "late"])
def test_a_head_that_wins_does_not_overflow(
    device: torch.device, tokens: int, begin: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late: the last of three chunks has a level near 128, the others lower ones; combined two at a time."""
    monkeypatch.setattr(launches, "AT_ONCE", (4, 4))
    q, k, v = (draw(device, torch.float32, 1, 4, tokens, 64, seed=s) for s in range(3))
    k -= 30
    k[:, 0, begin // 2 :, :2] += 5
    k[:, 0, begin:, :2] += 60  # Ō of the first small head is near their number, 128, whose exp is infinite in float32
    check(q, k, v, 2, "poster", limit=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads, dim", [(3, 32), (5, 18)])
def test_a_rest_of_channels(device: torch.device, heads: int, dim: int, variant: str, together: bool) -> None:
    """Pieces of 32 channels, and 26 more in a piece of their own that they do not fill."""
    check(*(draw(device, torch.float32, 2, heads, 11, dim, seed=s) for s in range(3)), 2, variant)


def test_many_chunks_are_combined(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than a program takes at a time, and more than the queries' programs take."""
    inputs = [draw(device, torch.float32, 1, 1, 300, 8, seed=s) for s in range(3)]
    for inside in (launches.INSIDE, 1):
        for name, number in (("INSIDE", inside), ("AT_ONCE", (4, 4)), ("TOGETHER", (0, 0))):
            monkeypatch.setattr(launches, name, number)
        launches.prepare_forward.cache_clear()
        assert cut_of(1, 8, 8, 300, 2, 4).chunks > 2
        check(*inputs, 2, "poster")
    launches.prepare_forward.cache_clear()


def test_packed_projection_gets_one_gradient(device: torch.device) -> None:
    packed = draw(device, torch.float32, 2, 21, 3, 2, 8).requires_grad_()
    grad = draw(device, torch.float32, 2, 2, 21, 8)
    (found,) = torch.autograd.grad(mobile(*packed.permute(2, 0, 3, 1, 4).unbind(0), 2), packed, grad)
    separate = [t.detach().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4).unbind(0)]
    parts = torch.autograd.grad(mobile(*separate, 2), separate, grad)
    assert torch.equal(torch.stack(parts).permute(1, 3, 0, 2, 4), found)


def test_odd_strides_and_poisoned_surroundings(device: torch.device) -> None:
    wide = torch.full((2, 40, 2, 40), float("nan"), device=device)
    wide[:, :37, :, 3:35:2] = draw(device, torch.float32, 2, 37, 2, 16)
    q = wide[:, :37, :, 3:35:2].transpose(1, 2)
    check(q, q.flip(2).transpose(2, 3).contiguous().transpose(2, 3), q * 2, 2, "poster")


def test_same_bits_every_time(device: torch.device) -> None:
    inputs = [draw(device, torch.float16, 1, 2, 70, 8, seed=s).requires_grad_() for s in range(3)]

    def run() -> tuple[Tensor, ...]:
        out = mobile(*inputs, 2)
        return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_opcheck(device: torch.device) -> None:
    inputs = [draw(device, torch.float32, 1, 2, 9, 8, seed=s).requires_grad_() for s in range(3)]
    torch.library.opcheck(torch.ops.linvit.mobile.default, (*inputs, None, 2, False, 1e-6))


def test_compiles_and_counts(device: torch.device) -> None:
    inputs = [draw(device, torch.float32, 1, 2, 17, 8, seed=s).requires_grad_() for s in range(3)]
    plain = torch.autograd.grad(mobile(*inputs, 2).square().sum(), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(mobile, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    found = torch.autograd.grad(compiled(*inputs, 2).square().sum(), inputs)
    assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))
    grid = TokenGrid.line(17)
    for variant in VARIANTS:
        with FlopCounterMode(display=False) as counter:
            mobile(*inputs, 2, released=variant == "released")
        mechanism = create_attention("mobile", variant=variant)
        assert counter.get_total_flops() == 2 * mechanism.macs(Size(1, 2, 8, 8, grid, grid))


@pytest.mark.parametrize("options", [{}, {"competition": False}, {"competition": False, "gate": "se"}], ids=str)
def test_the_mechanism_uses_it(device: torch.device, options: dict) -> None:
    q, k, v = (draw(device, torch.float32, 1, 2, 20, 8, seed=s) for s in range(3))
    torch.manual_seed(0)
    fused = create_attention("mobile", heads=2, head_dim=8, **options).to(device)
    plain = create_attention("mobile", heads=2, head_dim=8, impl="reference", **options).to(device)
    plain.load_state_dict(fused.state_dict())
    fused.impl = "triton"
    assert error(fused(q, k, v), plain(q, k, v)) < 1e-5


def test_the_mechanism_says_why_not(device: torch.device) -> None:
    q, k, v = (draw(device, torch.float32, 1, 2, 20, 12, seed=s) for s in range(3))
    mechanism = create_attention("mobile", small_head_dim=3)
    mechanism.impl = "triton"
    with pytest.raises(LinvitError, match="small heads of 3 channels"):
        mechanism(q, k, v)
    mechanism.impl = "auto"
    assert mechanism(q, k, v).isfinite().all()
    assert "more than 2048" in (why_not(*(torch.empty(1, 33, 2, 64, device=device) for _ in range(3)), 2) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("small", [2, 4, 8])
@pytest.mark.parametrize("batch, heads, dim, tokens", [(2, 6, 64, 785), (1, 12, 64, 1025), (3, 3, 64, 197)])
def test_real_sizes(
    device: torch.device, batch: int, heads: int, dim: int, tokens: int, small: int, variant: str
) -> None:
    check(*(draw(device, torch.bfloat16, batch, heads, tokens, dim, seed=s) for s in range(3)), small, variant)
