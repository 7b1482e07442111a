"""Mobile-Attention as one op, forward and backward: `mobile(q, k, v, small)`.

q, k and v are a host's `(batch, heads, tokens, head_dim)` in any strides; their channels are cut into heads of `small`.
The kernels are in mobile_triton.py and mobile_gradient_triton.py. Sums are in float32 and in fixed order: the same
inputs give the same bits. Registered as linvit::mobile; plain eager calls leave the dispatcher out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from linvit.errors import LinvitError
from linvit.kernels import mobile_launch as launch
from linvit.kernels.dispatch import no_kernels_on, unserved
from linvit.kernels.linear import packed_source, plain
from linvit.kernels.linear_launch import rows_like, unpack

SMALL = (1, 2, 4, 8)  # channels of a small head that fit the tiles
WIDEST = 2048  # channels of a token that fit a program's registers


def why_not(q: Tensor, k: Tensor, v: Tensor, small: int) -> str | None:
    """Why the kernels cannot serve these tensors, or None where they can."""
    why = unserved(q, k, v)
    if why is not None:
        return why
    channels, value_channels = q.shape[1] * q.shape[3], v.shape[1] * v.shape[3]
    if small not in SMALL:
        return f"small heads of {small} channels have no kernel, only those of {', '.join(map(str, SMALL))}"
    if channels % small or value_channels * small % channels or value_channels * small // channels not in SMALL:
        return f"the {value_channels} channels of v do not divide into {channels // small} heads of 1, 2, 4 or 8"
    if max(channels, value_channels) > WIDEST:
        return f"{max(channels, value_channels)} channels of a token are more than {WIDEST}"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to in an empty tensor"
    return None


def mobile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    small: int,
    *,
    released: bool = False,
    eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:
    """Mobile-Attention with its flows and head competition, the poster's variant or the released code's.

    `mask`, boolean (batch, tokens), is true for the keys that take part.
    """
    if not plain(q):
        return torch.ops.linvit.mobile.default(q, k, v, mask, small, released, eps)[0]
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return launch.forward(q, k, v, mask, small, released, eps)[0]
    qkv = packed_source(q, k, v)
    if qkv is not None:
        return _Packed.apply(qkv, (q, k, v), mask, small, released, eps)
    return _Separate.apply(q, k, v, mask, small, released, eps)


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how: Any) -> Tensor:
        out, flow, state = launch.forward(q, k, v, mask, *how)
        ctx.save_for_backward(q, k, v, mask, flow, state)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(grad, *ctx.saved_tensors, *ctx.how), None, None, None, None


class _Packed(torch.autograd.Function):
    """`qkv` is packed in any shape; `views` are its q, k and v."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, views: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, *how: Any) -> Tensor:
        q, k, v = views
        out, flow, state = launch.forward(q, k, v, mask, *how)
        ctx.save_for_backward(qkv, mask, flow, state)
        ctx.how, ctx.shape = how, q.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, mask, flow, state = ctx.saved_tensors
        batch, heads, tokens, dim = ctx.shape
        whole = qkv.view(batch, tokens, 3, heads, dim)
        d_qkv = torch.empty_like(whole)
        launch.backward(grad, *unpack(whole), mask, flow, state, *unpack(d_qkv), *ctx.how)
        return d_qkv.view(qkv.shape), None, None, None, None, None


def _forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    why = no_kernels_on(q.device)
    if why is not None:
        raise LinvitError(f"linvit::mobile cannot run here: {why}")
    return launch.forward(q, *rest)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, flow: Tensor, state: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
    launch.backward(grad, q, k, v, mask, flow, state, dq, dk, dv, *how)
    return dq, dk, dv


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, small: int, released: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, head_dim = q.shape
    small_heads = heads * head_dim // small
    numbers = small_heads * (small * (v.shape[1] * v.shape[3] // small_heads + 1) + 1)
    flow = q.new_empty((batch, tokens, 4, small), dtype=torch.float32)
    return rows_like(v), flow, q.new_empty((batch, numbers), dtype=torch.float32)


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return rows_like(q), rows_like(k), rows_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.how = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    found = torch.ops.linvit.mobile_backward.default(grad, *ctx.saved_tensors, *ctx.how)
    return *found, None, None, None, None


library = torch.library.Library("linvit", "FRAGMENT")
library.define(
    "mobile(Tensor q, Tensor k, Tensor v, Tensor? mask, int small, bool released, float eps) "
    "-> (Tensor, Tensor, Tensor)"
)
library.define(
    "mobile_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor flow, Tensor state, int small, "
    "bool released, float eps) -> (Tensor, Tensor, Tensor)"
)
for device in ("CUDA", "CPU"):  # on the CPU in Triton's interpreter
    library.impl("mobile", _forward, device)
    library.impl("mobile_backward", _gradients, device)
torch.library.register_fake("linvit::mobile", _fake, lib=library)
torch.library.register_fake("linvit::mobile_backward", _fake_gradients, lib=library)
torch.library.register_autograd("linvit::mobile", _differentiate, setup_context=_keep, lib=library)


@register_flop_formula(torch.ops.linvit.mobile)
def _flops(q: Any, k: Any, v: Any, mask: Any, small: int, released: bool, *_: Any, **__: Any) -> int:
    """2 per multiply-accumulate: both products, and four or five dot products of a token's channels."""
    batch, heads, tokens, head_dim = q
    return 2 * batch * tokens * (2 * v[1] * v[3] * small + (4 if released else 5) * heads * head_dim)


@register_flop_formula(torch.ops.linvit.mobile_backward)
def _backward_flops(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, flow: Any, state: Any, small: int, released: bool, *_: Any, **__: Any
) -> int:
    return 2 * _flops(q, k, v, mask, small, released)
