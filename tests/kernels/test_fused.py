"""What every fused op shares: packed gradients, also for those who look at the views, and its refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from linvit.attention import create_attention
from linvit.errors import LinvitError
from linvit.kernels import linear
from linvit.kernels.angular import angular
from linvit.kernels.fused import rows_like, signature_of
from linvit.kernels.linear import linear_attention
from linvit.kernels.mobile import mobile
from linvit.kernels.relu_quadratic import relu_quadratic
from linvit.kernels.xca import xca
from tests.kernels.conftest import ON_GPU
from tests.kernels.linear_reference import FORMULAS, draw, error, inputs

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
OPS: dict[str, Attention] = {
    "linear_attention": lambda q, k, v: linear_attention(q, k, v, FORMULAS["elu"]),
    "mobile": lambda q, k, v: mobile(q, k, v, 2),
    "relu_quadratic": relu_quadratic,
    "angular": angular,
    "xca": xca,
}
every = pytest.mark.parametrize("attend", OPS.values(), ids=OPS)
MECHANISMS = ("elu_linear", "castling", "mobile", "relu_quadratic", "angular", "xca")
each = pytest.mark.parametrize("name", MECHANISMS)


def projection(device: torch.device) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """A leaf, a packed projection made of it, and the views q, k and v of that."""
    flat = draw(device, torch.float32, 2, 24, 3 * 2 * 8).requires_grad_()
    qkv = flat * 1.0
    return flat, qkv, qkv.view(2, 24, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)


def exact(attend: Attention, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradient of the whole, and those of the views, from tensors that are nobody's views."""
    _, _, views = projection(device)
    leaves = [view.detach().clone().requires_grad_() for view in views]
    parts = torch.autograd.grad(attend(*leaves).sin().sum(), leaves)
    return torch.stack(parts).permute(1, 3, 0, 2, 4).reshape(2, 24, 48), parts


@every
def test_backward_writes_one_gradient_and_none_for_the_views(attend: Attention, device: torch.device) -> None:
    flat, _, views = projection(device)
    seen: list[tuple[Tensor | None, ...]] = []
    views[0].grad_fn.register_prehook(lambda gradients: seen.append(gradients))
    attend(*views).sin().sum().backward()
    assert torch.equal(flat.grad, exact(attend, device)[0])
    assert seen == [(None, None, None)]


@every
def test_the_gradient_of_a_view_can_be_asked_for(attend: Attention, device: torch.device) -> None:
    flat, qkv, views = projection(device)
    whole, parts = exact(attend, device)
    loss = attend(*views).sin().sum()
    for asked, wanted in (
        (views[:1], parts[:1]),
        (views, parts),
        ((flat,), (whole,)),
        ((qkv, *views), (whole, *parts)),
        ((views[2], flat), (parts[2], whole)),
    ):
        for found, exactly in zip(torch.autograd.grad(loss, asked, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(found, exactly)
    loss.backward(inputs=[flat], retain_graph=True)
    torch.testing.assert_close(flat.grad, whole)


@every
def test_those_who_watch_a_view_later_see_its_gradient(attend: Attention, device: torch.device) -> None:
    whole, parts = exact(attend, device)
    flat, _, (q, k, v) = projection(device)
    loss, seen = attend(q, k, v).sin().sum(), []
    k.retain_grad()
    v.register_hook(seen.append)
    loss.backward()
    torch.testing.assert_close(k.grad, parts[1])
    torch.testing.assert_close(seen, [parts[2]])
    torch.testing.assert_close(flat.grad, whole)


def test_views_that_are_leaves_get_their_own_gradients(device: torch.device) -> None:
    """Made without a graph from a projection that has one."""
    flat, qkv, _ = projection(device)
    with torch.no_grad():
        views = qkv.view(2, 24, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    for view in views:
        view.requires_grad_()
    attend = OPS["linear_attention"]
    attend(*views).sin().sum().backward()
    torch.testing.assert_close([view.grad for view in views], list(exact(attend, device)[1]))
    assert flat.grad is None


@every
def test_a_branch_beside_the_op_adds_its_gradient(attend: Attention, device: torch.device) -> None:
    """As a convolution of the values does: the view has a gradient of its own beside the packed one."""
    flat, _, (q, k, v) = projection(device)
    (attend(q, k, v).sin().sum() + (v * v).sum()).backward()
    own = torch.zeros(2, 24, 3, 2, 8, device=device)
    own[:, :, 2] = 2 * v.detach().transpose(1, 2)
    torch.testing.assert_close(flat.grad, exact(attend, device)[0] + own.flatten(2))


@every
def test_refuses_a_second_derivative(attend: Attention, device: torch.device) -> None:
    tensors = [draw(device, torch.float32, 1, 2, 9, 8, seed=s).requires_grad_() for s in range(3)]
    with pytest.raises(LinvitError, match="cannot be differentiated twice; use impl='reference'"):
        torch.autograd.grad(attend(*tensors).sum(), tensors, create_graph=True)


def test_an_operator_refuses_a_second_derivative_as_well(device: torch.device) -> None:
    qkv = draw(device, torch.float32, 1, 9, 3, 2, 8).requires_grad_()
    out, _ = torch.ops.linvit.linear_attention_packed(qkv, *(None,) * 6, *FORMULAS["elu"], True)
    with pytest.raises(LinvitError, match="twice"):
        torch.autograd.grad(out.sum(), qkv, create_graph=True)


def run(name: str, impl: str, tensors: list[Tensor], **options: float) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    heads, dim = tensors[0].shape[1], tensors[0].shape[3]
    mechanism = create_attention(name, heads=heads, head_dim=dim, impl=impl, **options).to(tensors[0].device)
    if name == "castling":
        mechanism.conv.conv.weight.data.fill_(0.1)
    out = mechanism(*tensors)
    return [out, *torch.autograd.grad(out.sin().sum(), tensors)] if out.requires_grad else [out]


@each
def test_trains_after_an_evaluation_and_evaluates_after_training(name: str, device: torch.device) -> None:
    """Of the same shape: a launch is kept, and what is saved for a gradient is written by another kernel."""
    tensors = inputs(device, torch.float32, 1, 2, 70, 8)
    wanted = run(name, "reference", tensors)
    for _ in range(2):
        with torch.no_grad():
            assert error(run(name, "triton", tensors)[0], wanted[0]) < 1e-5
        assert all(error(a, b) < 1e-4 for a, b in zip(run(name, "triton", tensors), wanted, strict=True))


@each
def test_an_eps_of_zero_leaves_the_padding_of_a_tile_finite(name: str, device: torch.device) -> None:
    if name == "relu_quadratic":
        return
    tensors = inputs(device, torch.float32, 1, 3, 21, 6)
    found, wanted = (run(name, impl, tensors, eps=0.0) for impl in ("triton", "reference"))
    assert all(error(a, b) < 1e-4 for a, b in zip(found, wanted, strict=True))


@each
def test_transforms_see_the_plain_formula(name: str, device: torch.device) -> None:
    """torch.func and forward-mode differentiation: a kernel knows neither, and would give no or a wrong derivative."""
    q, k, v = (t.detach() for t in inputs(device, torch.float32, 1, 2, 70, 8))
    mechanism = create_attention(name, heads=2, head_dim=8).to(device)

    def loss(q: Tensor) -> Tensor:
        return mechanism(q, k, v).sin().sum()

    def derivatives() -> list[Tensor]:
        with forward_ad.dual_level():
            along = forward_ad.unpack_dual(loss(forward_ad.make_dual(q, k))).tangent
        of_each = torch.vmap(torch.func.grad(loss))(torch.stack((q, k)))
        return [along, torch.func.jvp(loss, (q,), (k,))[1], torch.func.grad(loss)(q), *of_each]

    with torch.no_grad():
        loss(q)  # the second call takes the short way
    found, mechanism.impl = derivatives(), "reference"
    torch.testing.assert_close(found, derivatives())
    mechanism.impl = "triton"
    with pytest.raises(LinvitError, match=r"torch\.func"):
        torch.func.grad(loss)(q)
    with pytest.raises(LinvitError, match=r"torch\.func"), forward_ad.dual_level():
        linear_attention(forward_ad.make_dual(q, k), k, v, FORMULAS["elu"])


def test_what_lies_beside_q_on_another_device_is_refused(device: torch.device) -> None:
    q, k, v = (t.detach() for t in inputs(device, torch.float32, 1, 2, 9, 8))
    with pytest.raises(LinvitError, match=r"a mask or parameter on meta"):
        linear_attention(q, k, v, FORMULAS["qt"], None, torch.ones((), device="meta"))


@pytest.mark.skipif(ON_GPU, reason="ends the process there")
def test_a_kernel_that_leaves_its_tensors_is_found(device: torch.device) -> None:
    q, k, v = (draw(device, torch.float32, 1, 1, 20, 8, seed=seed) for seed in range(3))
    nothing, formula = (None,) * 6, FORMULAS["relu"]
    launch = linear.prepare("forward", signature_of(q, k, v), formula, linear.Beside.of(nothing, formula), False)
    launch.phases[0](q, k, v, rows_like(v), *nothing, None)
    with pytest.raises(Exception, match="outside of all tensors"):
        launch.phases[0](q, k[:, :, :19].clone(), v, rows_like(v), *nothing, None)
