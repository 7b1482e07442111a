"""The fused ReLU-quadratic attention against float64, and how PyTorch may use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import create_attention
from linvit.clock import peak_memory
from linvit.errors import LinvitError
from linvit.kernels import relu_quadratic as launch
from linvit.kernels.relu_quadratic import Options, relu_quadratic, why_not, why_not_bias
from tests.kernels.conftest import ON_GPU
from tests.kernels.quadratic_reference import LIMITS, draw, error, reference


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, limit: float | None = None
) -> None:
    """Output and all gradients against float64; masked keys and values are poisoned for us and not for the truth."""
    limit = limit or LIMITS[q.dtype]
    grad = draw(q.device, q.dtype, *q.shape[:3], v.shape[3], seed=9)
    given = (q, k, v) if bias is None else (q, k, v, bias)
    exact = [t.detach().double().requires_grad_() for t in given]
    truth = reference(*exact[:3], mask, *exact[3:])
    truths = torch.autograd.grad(truth, exact, grad.double())
    ours = [t.detach().requires_grad_() for t in given]
    if mask is not None:
        for t in ours[1:3]:
            t.data = t.data.masked_fill(~mask[:, None, :, None], float("nan"))
    out = relu_quadratic(*ours[:3], mask, *ours[3:])
    assert out.shape == truth.shape and out.dtype == q.dtype and out.transpose(1, 2).is_contiguous()
    assert error(out, truth) < limit
    names = ("q", "k", "v", "bias")[: len(given)]
    for name, found, exactly in zip(names, torch.autograd.grad(out, ours, grad), truths, strict=True):
        assert found.shape == exactly.shape and error(found, exactly) < limit, f"d{name}"


@pytest.mark.parametrize("tokens", [1, 7, 49, 63, 197])
def test_any_number_of_tokens(device: torch.device, tokens: int) -> None:
    check(*(draw(device, torch.float32, 1, 2, tokens, 16, seed=s) for s in range(3)))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("dim, value_dim", [(1, 3), (24, 40), (64, 64), (96, 128)])
def test_any_width_and_type(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    q, k = (draw(device, dtype, 1, 2, 70, dim, seed=s) for s in range(2))
    check(q, k, draw(device, dtype, 1, 2, 70, value_dim, seed=2))


@pytest.mark.parametrize("dtype, dim, value_dim", [(torch.bfloat16, 72, 80), (torch.float32, 96, 24)], ids=str)
def test_heads_in_two_pieces(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    """Heads side by side as a projection leaves them, every stride a multiple of 8 and not of 16."""
    mask = draw(device, torch.float32, 1, 70) > -0.5
    q, k = (draw(device, dtype, 1, 70, 1, dim, seed=s).transpose(1, 2) for s in range(2))
    v = draw(device, dtype, 1, 70, 1, value_dim, seed=2).transpose(1, 2)
    check(q, k, v)
    check(q, k, v, mask, draw(device, dtype, 1, 1, 70, 70, seed=3))


@pytest.mark.parametrize("queries, keys", [(130, 7), (5, 140)])
def test_keys_and_queries_may_differ_in_number(device: torch.device, queries: int, keys: int) -> None:
    q = draw(device, torch.float32, 2, 1, queries, 16)
    check(q, *(draw(device, torch.float32, 2, 1, keys, 16, seed=s) for s in (1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_key_mask(device: torch.device, dtype: torch.dtype) -> None:
    mask = draw(device, torch.float32, 2, 70) > -0.5
    check(*(draw(device, dtype, 2, 2, 70, 16, seed=s) for s in range(3)), mask)


@pytest.mark.parametrize(
    "shape", [(1, 2, 40, 40), (2, 2, 40, 40), (4, 2, 40, 40), (4, 1, 40, 40), (2, 40, 40), (40,)], ids=str
)
def test_a_bias_in_any_shape(device: torch.device, shape: tuple[int, ...]) -> None:
    check(
        *(draw(device, torch.float32, 4, 2, 40, 16, seed=s) for s in range(3)), bias=draw(device, torch.float32, *shape)
    )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("queries, keys, dim", [(49, 49, 32), (33, 70, 24), (130, 17, 96)])
def test_a_bias_with_any_type_and_size(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, dim: int
) -> None:
    """In its own precision, which need not be the queries'; and where the last rows and columns are not whole tiles."""
    q = draw(device, dtype, 2, 2, queries, dim)
    k, v = (draw(device, dtype, 2, 2, keys, dim, seed=s) for s in (1, 2))
    for kind in {dtype, torch.float32}:
        check(q, k, v, bias=draw(device, kind, 1, 2, queries, keys, seed=3))


def test_a_bias_beside_a_key_mask(device: torch.device) -> None:
    mask = draw(device, torch.float32, 2, 70) > -0.5
    q, k, v = (draw(device, torch.float32, 2, 2, 70, 16, seed=s) for s in range(3))
    for shape in ((1, 2, 70, 70), (2, 2, 70, 70)):
        check(q, k, v, mask, draw(device, torch.float32, *shape))


def test_a_bias_of_minus_infinity_and_one_in_a_wider_tensor(device: torch.device) -> None:
    """What a shift mask may hold, and memory that must not be read."""
    q, k, v = (draw(device, torch.float32, 2, 2, 37, 16, seed=s) for s in range(3))
    wide = torch.full((1, 2, 40, 80), float("nan"), device=device)
    wide[:, :, :37, 1:75:2] = draw(device, torch.float32, 1, 2, 37, 37)
    bias = wide[:, :, :37, 1:75:2]
    check(q, k, v, bias=bias)
    bias[..., :9] = float("-inf")
    assert error(relu_quadratic(q, k, v, None, bias), reference(q, k, v, None, bias)) < 1e-5


def test_many_images_share_a_bias(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As windows do: sums over some of the images each, the last of them over fewer."""
    assert launch.share_of(1024, 48, 132) == 94 and launch.share_of(8, 3072, 132) == 8
    monkeypatch.setattr(launch, "share_of", lambda *_: 3)
    q, k, v = (draw(device, torch.float32, 10, 1, 9, 8, seed=s) for s in range(3))
    mask = draw(device, torch.float32, 10, 9) > -1
    for images in (1, 2, 5):
        check(q, k, v, bias=draw(device, torch.float32, images, 1, 9, 9))
        check(q, k, v, mask, bias=draw(device, torch.float32, images, 1, 9, 9))


def test_a_packed_projection_with_a_bias(device: torch.device) -> None:
    packed = draw(device, torch.float32, 2, 35, 3, 2, 16).requires_grad_()
    bias = draw(device, torch.float32, 1, 2, 35, 35).requires_grad_()
    grad = draw(device, torch.float32, 2, 2, 35, 16)
    exact = [t.detach().double().requires_grad_() for t in (packed, bias)]
    truth = reference(*exact[0].permute(2, 0, 3, 1, 4).unbind(0), None, exact[1])
    out = relu_quadratic(*packed.permute(2, 0, 3, 1, 4).unbind(0), None, bias)
    found = torch.autograd.grad(out, (packed, bias), grad)
    for ours, exactly in zip(found, torch.autograd.grad(truth, exact, grad.double()), strict=True):
        assert error(ours, exactly) < 2e-5
    (alone,) = torch.autograd.grad(
        relu_quadratic(*packed.detach().permute(2, 0, 3, 1, 4).unbind(0), None, bias), bias, grad
    )
    assert error(alone, found[1]) < 1e-6


def test_packed_projection_gets_one_gradient(device: torch.device) -> None:
    packed = draw(device, torch.float32, 2, 35, 3, 2, 16).requires_grad_()
    grad = draw(device, torch.float32, 2, 2, 35, 16)
    (found,) = torch.autograd.grad(relu_quadratic(*packed.permute(2, 0, 3, 1, 4).unbind(0)), packed, grad)
    exact = packed.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(reference(*exact.permute(2, 0, 3, 1, 4).unbind(0)), exact, grad.double())
    assert error(found, truth) < 2e-5
    separate = [t.detach().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4).unbind(0)]
    parts = torch.autograd.grad(relu_quadratic(*separate), separate, grad)
    assert torch.equal(torch.stack(parts).permute(1, 3, 0, 2, 4), found)


def test_odd_strides_and_poisoned_surroundings(device: torch.device) -> None:
    wide = torch.full((2, 40, 2, 40), float("nan"), device=device)
    wide[:, :37, :, 3:35:2] = draw(device, torch.float32, 2, 37, 2, 16)
    q = wide[:, :37, :, 3:35:2].transpose(1, 2)
    assert q.stride(-1) == 2
    check(q, q.flip(2).transpose(2, 3).contiguous().transpose(2, 3), q * 2)


def test_outputs_are_written_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_like = launch.rows_like
    monkeypatch.setattr(launch, "rows_like", lambda *a: rows_like(*a).fill_(float("nan")))
    q, k, v = (draw(device, torch.float32, 1, 2, 37, 16, seed=s).requires_grad_() for s in range(3))
    out = relu_quadratic(q, k, v)
    assert out.isfinite().all()
    gradients = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    launch.backward(
        torch.ones_like(out), *(t.detach() for t in (q, k, v)), *gradients, (None, None), [], Options(), (False,)
    )
    assert all(g.isfinite().all() for g in gradients)


def test_same_bits_every_time(device: torch.device) -> None:
    inputs = [draw(device, torch.float16, 2, 2, 130, 16, seed=s).requires_grad_() for s in range(3)]

    def run() -> tuple[Tensor, ...]:
        out = relu_quadratic(*inputs)
        return (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_large_scores_stay_inside_float16(device: torch.device) -> None:
    q, k = (40 + draw(device, torch.float16, 1, 1, 33, 64, seed=s) for s in range(2))  # q · k is above 65,504
    check(q, k, draw(device, torch.float16, 1, 1, 33, 64, seed=2))


def test_opcheck(device: torch.device) -> None:
    inputs = [draw(device, torch.float32, 1, 2, 19, 8, seed=s).requires_grad_() for s in range(3)]
    torch.library.opcheck(torch.ops.linvit.relu_quadratic.default, (*inputs, None, None))
    mask = draw(device, torch.float32, 1, 19) > 0
    torch.library.opcheck(torch.ops.linvit.relu_quadratic.default, (*inputs, mask, None))
    for learned in (True, False):
        bias = draw(device, torch.float32, 1, 2, 19, 19).requires_grad_(learned)
        torch.library.opcheck(torch.ops.linvit.relu_quadratic.default, (*inputs, mask, bias))


def test_compiles_checkpoints_and_counts(device: torch.device) -> None:
    inputs = [draw(device, torch.float32, 1, 2, 33, 16, seed=s).requires_grad_() for s in range(3)]
    plain = torch.autograd.grad(relu_quadratic(*inputs).square().sum(), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(relu_quadratic, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for out in (compiled(*inputs), checkpoint(relu_quadratic, *inputs, use_reentrant=False)):
        found = torch.autograd.grad(out.square().sum(), inputs)
        assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))
    with FlopCounterMode(display=False) as counter:
        relu_quadratic(*inputs)
    assert counter.get_total_flops() == 2 * 2 * 33 * 33 * (16 + 16)


def test_the_mechanism_uses_it_or_says_why_not(device: torch.device) -> None:
    q, k, v = (draw(device, torch.float32, 1, 2, 20, 8, seed=s) for s in range(3))
    fused, plain = create_attention("relu_quadratic"), create_attention("relu_quadratic", impl="reference")
    fused.impl = "triton"
    assert error(fused(q, k, v), plain(q, k, v)) < 1e-5
    bias = draw(device, torch.float32, 1, 2, 20, 20)
    assert error(fused(q, k, v, bias=bias), plain(q, k, v, bias=bias)) < 1e-5
    with pytest.raises(LinvitError, match="the bias is float64"):
        fused(q, k, v, bias=bias.double())
    with pytest.raises(LinvitError, match="the bias is on meta"):
        fused(q, k, v, bias=bias.to("meta"))
    far = torch.empty_strided((1, 2, 20, 20), (0, 0, 2**24, 1), device="meta")
    assert "too far apart" in (why_not_bias(far, far.device) or "")
    fused.impl = "auto"
    assert error(fused(q, k, v, bias=bias), plain(q, k, v, bias=bias)) < 1e-5
    assert "wider than 256" in (why_not(*(torch.empty(1, 1, 2, 257, device=device) for _ in range(3))) or "")
    assert "float64" in (why_not(q.double(), k.double(), v.double()) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [785, 1025, 3137])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_real_sizes(device: torch.device, tokens: int, dim: int, dtype: torch.dtype) -> None:
    """Among millions of scores some are so near zero that rounding turns their sign, and with it a gradient on or off:
    with a share p of them the error is √p, however exact the sums are."""
    limit = {torch.float32: 1e-3, torch.bfloat16: 1e-2}.get(dtype)
    check(*(draw(device, dtype, 2, 3, tokens, dim, seed=s) for s in range(3)), limit=limit)


@pytest.mark.gpu
@pytest.mark.parametrize("windows, tokens, dim", [(256, 49, 32), (64, 196, 32), (8, 197, 64), (2, 1025, 64)])
@pytest.mark.parametrize("images", [1, 2, None])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_real_windows(
    device: torch.device, windows: int, tokens: int, dim: int, images: int | None, dtype: torch.dtype
) -> None:
    bias = draw(device, dtype, images or windows, 3, tokens, tokens, seed=3)
    limit = {torch.float32: 1e-3, torch.bfloat16: 1e-2}.get(dtype)
    check(*(draw(device, dtype, windows, 3, tokens, dim, seed=s) for s in range(3)), bias=bias, limit=limit)


@pytest.mark.gpu
def test_memory_is_linear(device: torch.device) -> None:
    def peak(tokens: int) -> int:
        packed = torch.randn(1, tokens, 3, 6, 64, device=device, dtype=torch.bfloat16).requires_grad_()
        return peak_memory(lambda: relu_quadratic(*packed.permute(2, 0, 3, 1, 4).unbind(0)).sum().backward(), device)

    assert peak(8192) < 2.2 * peak(4096)
