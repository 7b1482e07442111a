"""What every fused op shares: packed gradients, also for those who look at the views, and its refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.kernels import linear
from linvit.kernels.fused import rows_like, signature_of
from linvit.kernels.linear import linear_attention
from linvit.kernels.mobile import mobile
from linvit.kernels.relu_quadratic import relu_quadratic
from tests.kernels.conftest import ON_GPU
from tests.kernels.linear_reference import FORMULAS, draw

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
OPS: dict[str, Attention] = {
    "linear_attention": lambda q, k, v: linear_attention(q, k, v, FORMULAS["elu"]),
    "mobile": lambda q, k, v: mobile(q, k, v, 2),
    "relu_quadratic": relu_quadratic,
}
every = pytest.mark.parametrize("attend", OPS.values(), ids=OPS)


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


@pytest.mark.skipif(ON_GPU, reason="ends the process there")
def test_a_kernel_that_leaves_its_tensors_is_found(device: torch.device) -> None:
    q, k, v = (draw(device, torch.float32, 1, 1, 20, 8, seed=seed) for seed in range(3))
    nothing, formula = (None,) * 6, FORMULAS["relu"]
    launch = linear.prepare("forward", signature_of(q, k, v), formula, linear.Beside.of(nothing, formula), False)
    launch.phases[0](q, k, v, rows_like(v), *nothing, None)
    with pytest.raises(Exception, match="outside of all tensors"):
        launch.phases[0](q, k[:, :, :19].clone(), v, rows_like(v), *nothing, None)
