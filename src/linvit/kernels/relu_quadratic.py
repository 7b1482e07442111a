"""ReLU-quadratic attention, `out = relu(q · kᵀ / √d) · v / keys`, without the N×N matrix: one operator, two homes.

On a GPU it is Triton's (relu_quadratic_triton.py), on the CPU plain PyTorch over tiles (relu_quadratic_cpu.py). Both
recompute the scores in the backward pass, so memory is linear in the tokens. Sums are in float32, in fixed order: the
same inputs give the same bits. Registered as linvit::relu_quadratic; plain eager calls leave the dispatcher out.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from linvit.kernels import relu_quadratic_cpu, relu_quadratic_launch
from linvit.kernels.dispatch import interpreted, unserved
from linvit.kernels.linear import packed_source, plain
from linvit.kernels.linear_launch import rows_like, unpack

WIDEST = 256  # channels of a head that fit a program's registers
FEW = 64  # tokens up to which the CPU does better without tiles


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Triton kernels cannot serve these tensors, or None where they can."""
    why = unserved(q, k, v)
    if why is not None:
        return why
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads of {max(q.shape[3], v.shape[3])} channels are wider than {WIDEST}"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to in an empty tensor"
    return None


def on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
    """The attention on the CPU: over tiles, but not with so few tokens, as in windows, that calls take longer than
    products. None elsewhere, and for exporters, which are given the formula as it is written."""
    if q.device.type != "cpu" or not q.dtype == k.dtype == v.dtype or torch.compiler.is_exporting():
        return None
    if max(q.shape[2], k.shape[2]) > FEW or q.dtype in relu_quadratic_cpu.HALF or mask is not None:
        return relu_quadratic(q, k, v, mask)
    return ((q @ k.mT).relu_() @ v).mul_(q.shape[3] ** -0.5 / k.shape[2])


def home(q: Tensor) -> ModuleType:
    return relu_quadratic_launch if q.device.type != "cpu" or interpreted() else relu_quadratic_cpu


def relu_quadratic(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part. Views of one packed projection get their
    gradients in one packed tensor.
    """
    if not plain(q):
        return torch.ops.linvit.relu_quadratic.default(q, k, v, mask)
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return home(q).forward(q, k, v, mask)
    qkv = packed_source(q, k, v)
    return _Separate.apply(q, k, v, mask) if qkv is None else _Packed.apply(qkv, (q, k, v), mask)


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        return home(q).forward(q, k, v, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(grad, *ctx.saved_tensors), None


class _Packed(torch.autograd.Function):
    """`qkv` is packed in any shape; `views` are its q, k and v."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, views: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(qkv, mask)
        ctx.shape = views[0].shape
        return home(qkv).forward(*views, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, mask = ctx.saved_tensors
        batch, heads, tokens, dim = ctx.shape
        whole = qkv.view(batch, tokens, 3, heads, dim)
        d_qkv = torch.empty_like(whole)
        home(qkv).backward(grad, *unpack(whole), mask, *unpack(d_qkv))
        return d_qkv.view(qkv.shape), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return home(q).forward(q, k, v, mask)


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
    home(q).backward(grad, q, k, v, mask, dq, dk, dv)
    return dq, dk, dv


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return rows_like(v, q.shape[2])


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    return rows_like(q), rows_like(k), rows_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.linvit.relu_quadratic_backward.default(grad, *ctx.saved_tensors), None


library = torch.library.Library("linvit", "FRAGMENT")
library.define("relu_quadratic(Tensor q, Tensor k, Tensor v, Tensor? mask) -> Tensor")
library.define(
    "relu_quadratic_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask) -> (Tensor, Tensor, Tensor)"
)
for device in ("CPU", "CUDA"):
    library.impl("relu_quadratic", _forward, device)
    library.impl("relu_quadratic_backward", _gradients, device)
torch.library.register_fake("linvit::relu_quadratic", _fake, lib=library)
torch.library.register_fake("linvit::relu_quadratic_backward", _fake_gradients, lib=library)
torch.library.register_autograd("linvit::relu_quadratic", _differentiate, setup_context=_keep, lib=library)


@register_flop_formula(torch.ops.linvit.relu_quadratic)
def _flops(q: Any, k: Any, v: Any, mask: Any, *_: Any, **__: Any) -> int:
    """2 per multiply-accumulate of the two products."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * v[2] * (head_dim + v[3])


@register_flop_formula(torch.ops.linvit.relu_quadratic_backward)
def _backward_flops(grad: Any, q: Any, k: Any, v: Any, mask: Any, *_: Any, **__: Any) -> int:
    """What the gradients need: the scores again, dq and dk, dv and its transpose. Work done twice is not counted."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * v[2] * (3 * head_dim + 2 * v[3])
