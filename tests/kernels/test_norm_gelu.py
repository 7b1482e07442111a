"""QT-ViT's released form in one op against float64 of PyTorch's own BatchNorm and GELU, and who still gets those."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from linvit import clock
from linvit.attention import Mechanism, Rotary, TokenGrid, create_attention
from linvit.errors import LinvitError
from linvit.kernels import linear, norm_gelu
from linvit.kernels.fused import Launch
from tests.kernels.conftest import ON_GPU
from tests.kernels.linear_reference import draw, error

FP32, BF16 = torch.float32, torch.bfloat16
modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def released(heads: int, dim: int, device: torch.device, training: bool, **options: Any) -> Mechanism:
    """QT-ViT's, on the kernel or an error, with a norm that does something."""
    mechanism = create_attention("qt", heads=heads, head_dim=dim, shortcut=True, impl="triton", **options)
    norm = mechanism.shortcut.norm
    for tensor, seed in ((norm.weight, 1), (norm.bias, 2), (norm.running_mean, 3)):
        tensor.data.copy_(draw(torch.device("cpu"), FP32, dim, seed=seed))
    norm.running_var.fill_(0.6)
    return mechanism.to(device).train(training)


def exact(mechanism: Mechanism) -> Mechanism:
    twin = copy.deepcopy(mechanism).double()
    twin.impl = "reference"
    return twin


def packed(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return (draw(device, dtype, *shape) + 0.3).detach().requires_grad_()


def attend(mechanism: Mechanism, qkv: Tensor, **given: Any) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return mechanism(q, k, v, **given)


def compare(mechanism: Mechanism, qkv: Tensor, **given: Any) -> None:
    """Output, packed gradient, the parameters' gradients and the buffers, by one call of the op."""
    half, twin = qkv.dtype != FP32, exact(mechanism)
    with mock.patch.object(norm_gelu.op, "forward", wraps=norm_gelu.op.forward) as taken:
        out = attend(mechanism, qkv, **given)
    assert taken.call_count == 1
    double = qkv.detach().double().requires_grad_()
    wanted = attend(twin, double, **{name: rotary_of(value) for name, value in given.items()})
    grad = draw(qkv.device, qkv.dtype, *out.shape, seed=5)
    out.backward(grad)
    wanted.backward(grad.double())
    assert out.dtype == qkv.dtype and out.transpose(1, 2).is_contiguous()
    assert error(out, wanted) < (6e-3 if half else 1e-5)
    assert qkv.grad is not None and error(qkv.grad, double.grad) < (1e-2 if half else 1e-4)
    for (name, one), other in zip(mechanism.named_parameters(), twin.parameters(), strict=True):
        least = 1e-2 * float(grad.norm()) if name == "scale" else 1e-30
        assert one.grad.dtype == one.dtype and error(one.grad, other.grad, least) < (1e-2 if half else 1e-4), name
    for one, other in zip(mechanism.buffers(), twin.buffers(), strict=True):
        assert error(one, other) < 1e-6


def rotary_of(given: Any) -> Any:
    return Rotary(given.cos.double(), given.sin.double(), given.blocks) if isinstance(given, Rotary) else given


@modes
@pytest.mark.parametrize(
    "dtype, batch, heads, tokens, dim",
    [(FP32, 2, 3, 197, 20), (BF16, 2, 3, 197, 20), (torch.float16, 2, 2, 49, 64), (BF16, 1, 2, 63, 72),
     (FP32, 3, 1, 7, 80), (BF16, 1, 2, 49, 96), (FP32, 1, 1, 33, 256), (FP32, 1, 2, 1, 16)],
    ids=str,
)  # fmt: skip
def test_output_gradients_and_running_statistics(
    dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int, training: bool, device: torch.device
) -> None:
    compare(released(heads, dim, device, training), packed(device, dtype, batch, tokens, 3, heads, dim))


@modes
def test_with_rotary_position_and_as_the_paper_has_it(training: bool, device: torch.device) -> None:
    axial = Rotary.axial(TokenGrid(4, 5), 8)
    rotary = Rotary(axial.cos.to(device), axial.sin.to(device), axial.blocks)
    compare(released(2, 8, device, training), packed(device, FP32, 2, 21, 3, 2, 8), rotary=rotary)
    compare(released(2, 8, device, training, variant="compact"), packed(device, FP32, 2, 21, 3, 2, 8))


def test_values_far_from_zero(device: torch.device) -> None:
    """A mean of a million standard deviations: what squares alone would leave is noise."""
    v = draw(device, torch.float64, 3, 301, 2, 24).transpose(1, 2) * 1e-2 + torch.arange(24, device=device) * 100
    v = v.float()
    wanted = v.double()
    mean, var = norm_gelu.batch_moments(v, None, None, None, 0.1)
    torch.testing.assert_close(mean, wanted.mean((0, 1, 2)).float())
    torch.testing.assert_close(var, wanted.var((0, 1, 2), unbiased=False).float(), rtol=1e-5, atol=0)


def test_constant_and_non_finite_values(device: torch.device) -> None:
    """A channel that never changes has no variance, and a NaN reaches the running statistics."""
    v, running = torch.full((2, 1, 50, 4), 0.1, device=device), torch.ones(4, device=device)
    v[1, 0, 7, 2] = float("nan")
    mean, var = norm_gelu.batch_moments(v, running.clone(), running, None, 0.5)
    still = torch.tensor([True, True, False, True], device=device)
    assert torch.equal(var.isnan(), ~still) and torch.equal(mean.isnan(), ~still) and not var[still].any()
    assert torch.equal(running.isnan(), ~still) and (running[still] == 0.5).all()


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
def test_running_statistics_are_those_of_batchnorm(momentum: float | None, device: torch.device) -> None:
    norm = nn.BatchNorm1d(8, momentum=momentum).to(device)
    counted = [tensor.clone() for tensor in (norm.running_mean, norm.running_var, norm.num_batches_tracked)]
    for seed in range(3):
        v = draw(device, FP32, 2, 3, 50, 8, seed=seed) + seed
        norm(v.reshape(-1, 8))
        norm_gelu.batch_moments(v, *counted, momentum)
    for one, other in zip(counted, norm.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_statistics_of_every_batch_that_nothing_tracks(device: torch.device) -> None:
    mechanism = released(2, 16, device, True)
    mechanism.shortcut.norm = nn.BatchNorm1d(16, track_running_stats=False).to(device)
    for training in (True, False):
        compare(mechanism.train(training), packed(device, FP32, 2, 21, 3, 2, 16))
        mechanism.zero_grad()


def test_launches(device: torch.device) -> None:
    """In evaluation one beside the linear core's, in training three; the same inputs give the same bits."""
    qkv, counts = packed(device, BF16, 2, 197, 3, 3, 64).detach(), []
    plain = create_attention("qt", impl="triton").to(device)
    for mechanism in (plain, released(3, 64, device, False), released(3, 64, device, True)):
        launch = Launch.__call__
        with torch.no_grad(), mock.patch.object(Launch, "__call__", autospec=True, side_effect=launch) as launched:
            out = attend(mechanism, qkv)
            counts.append(launched.call_count)
            assert torch.equal(out, attend(mechanism, qkv))
    assert [count - counts[0] for count in counts] == [0, 1, 3]


@modes
def test_gradients_of_views_by_a_gradient_without_strides(training: bool, device: torch.device) -> None:
    mechanism, found = released(2, 16, device, training), []
    qkv = packed(device, FP32, 2, 21, 3, 2, 16)
    for one, whole in ((mechanism, qkv), (exact(mechanism), qkv.double())):
        views = [part.detach().requires_grad_() for part in whole.permute(2, 0, 3, 1, 4)]
        found.append(torch.autograd.grad(one(*views).sum(), views))
    assert error(found[0][2], found[1][2]) < 1e-5


@pytest.mark.gpu
def test_a_replayed_graph_moves_the_running_statistics(device: torch.device) -> None:
    mechanism, qkv = released(2, 16, device, True), packed(device, BF16, 2, 197, 3, 2, 16).detach()
    other = copy.deepcopy(mechanism)
    with torch.no_grad():
        replay = clock.record([lambda: attend(mechanism, qkv)])  # called once before
        for _ in range(2):
            replay()
        for _ in range(3):
            attend(other, qkv)
    for one, wanted in zip(mechanism.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, wanted)


def test_a_norm_that_changed_meanwhile_is_noticed(device: torch.device) -> None:
    mechanism, qkv = released(2, 16, device, False), packed(device, FP32, 2, 21, 3, 2, 16)
    out = attend(mechanism, qkv)
    attend(mechanism.train(), qkv)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@modes
def test_opcheck(training: bool, device: torch.device) -> None:
    v = packed(device, FP32, 2, 20, 3, 2, 8)
    q, k, v = (part.detach().requires_grad_() for part in v.permute(2, 0, 3, 1, 4).unbind(0))
    buffers = (torch.zeros(8, device=device), torch.ones(8, device=device), torch.tensor(0, device=device))
    torch.library.opcheck(torch.ops.linvit.batch_moments.default, (v.detach(), *buffers, 0.1))
    mean, var = torch.ops.linvit.batch_moments(v.detach(), *buffers, 0.1)
    learned = [draw(device, FP32, 8, seed=i).requires_grad_() for i in range(2)]
    scale = torch.tensor(0.5, device=device, requires_grad=True)
    options = norm_gelu.Options("square", 1e-15, 1e-15, True, "", 1e-5, training)
    given = (None, None, None, mean, var, scale, *learned)
    torch.library.opcheck(torch.ops.linvit.linear_norm_gelu.default, (q, k, v, *given, *options, True))


@modes
def test_compiles_as_one_graph(training: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    mechanism, qkv = released(2, 16, device, training), packed(device, FP32, 2, 21, 3, 2, 16)
    other, backend = copy.deepcopy(mechanism), "inductor" if ON_GPU else "aot_eager"
    compiled, found = torch.compile(lambda x: attend(other, x), fullgraph=True, backend=backend), []
    for run, module in ((compiled, other), (lambda x: attend(mechanism, x), mechanism)):
        leaves = (qkv, *module.parameters())
        for _ in range(2):
            gradients = torch.autograd.grad(run(qkv).sin().sum(), leaves)
        found.append((*gradients, *module.buffers()))
    for one, wanted in zip(*found, strict=True):
        torch.testing.assert_close(one, wanted)


def test_who_gets_pytorchs_norm(device: torch.device) -> None:
    """Another kind of norm, other types, a transform: the same result; a single sample: the same error."""
    qkv = packed(device, FP32, 2, 21, 3, 2, 16)
    mechanism = released(2, 16, device, True)
    with mock.patch.object(norm_gelu.op, "forward", side_effect=AssertionError("taken")):
        bare, grouped = copy.deepcopy(mechanism), copy.deepcopy(mechanism)
        bare.shortcut.norm = nn.BatchNorm1d(16, affine=False).to(device)
        bare.shortcut.norm.register_parameter("anchor", nn.Parameter(torch.zeros(1, device=device)))
        grouped.shortcut = nn.SyncBatchNorm.convert_sync_batchnorm(grouped.shortcut)
        for other in (bare, grouped.eval()):
            assert error(attend(other, qkv), attend(exact(other), qkv.double())) < 1e-6
        double = copy.deepcopy(mechanism).double()
        double.impl = "auto"
        assert error(attend(double, qkv.double()), attend(exact(mechanism), qkv.double())) < 1e-12
        one = create_attention("qt", heads=1, head_dim=16, shortcut=True).to(device)
        with pytest.raises(ValueError, match="more than 1 value"):
            attend(one, qkv[:1, :1, :, :1])
        assert attend(one, qkv[:0, :, :, :1]).shape == (0, 1, 21, 16)
        mechanism = released(2, 16, device, False)
        mechanism.impl, wanted = "auto", exact(mechanism)
        twins = ((mechanism, qkv.detach()), (wanted, qkv.detach().double()))
        tangents = [torch.func.jvp(partial(attend, one), (x,), (x.cos(),))[1] for one, x in twins]
        assert error(*tangents) < 1e-5
    mechanism.impl = "triton"
    with pytest.raises(LinvitError, match="twice"):
        torch.autograd.grad(attend(mechanism, qkv).sum(), qkv, create_graph=True)


def test_flops_are_the_linear_cores(device: torch.device) -> None:
    mechanism, qkv = released(2, 16, device, True), packed(device, FP32, 2, 21, 3, 2, 16).detach()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        attend(mechanism, qkv)
    formula = linear.Formula("square", True)
    assert counter.get_total_flops() == linear.flops(*(torch.Size((2, 2, 21, 16)),) * 2, formula, (None,) * 6)
