"""ReLU-quadratic attention, `relu(q · kᵀ / √d + bias) · v / keys`, without the N×N matrix: one operator, two homes.

On a GPU it is Triton's (relu_quadratic_triton.py), on the CPU plain PyTorch over tiles (relu_quadratic_cpu.py). Both
recompute the scores in the backward pass, so memory is linear in the tokens. Sums are in float32, in fixed order: the
same inputs give the same bits. A bias is read tile by tile, in the shape it has: `(1, heads, N, N)` is shared by all
images, and fewer images than there are come again in turn. Registered as linvit::relu_quadratic; plain eager calls
leave the dispatcher out.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from linvit.kernels import relu_quadratic_cpu, relu_quadratic_launch
from linvit.kernels.dispatch import DTYPES, interpreted, unserved
from linvit.kernels.linear import packed_source, plain
from linvit.kernels.linear_launch import rows_like, unpack

WIDEST = 256  # channels of a head that fit a program's registers
FARTHEST = 2**23  # numbers between rows of a bias, of which a tile has up to 128
FEW = 64  # tokens up to which the CPU does better without tiles


def why_not(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the Triton kernels cannot serve these tensors, or None where they can."""
    why = unserved(q, k, v)
    if why is not None:
        return why
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads of {max(q.shape[3], v.shape[3])} channels are wider than {WIDEST}"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to in an empty tensor"
    return None if bias is None else why_not_bias(bias, q.device)


def why_not_bias(bias: Tensor, device: torch.device) -> str | None:
    """The same of a bias: pointers to another device's memory must not reach a kernel."""
    if bias.device != device:
        return f"the bias is on {bias.device}, q, k and v are on {device}"
    if bias.dtype not in DTYPES:
        return f"the bias is {str(bias.dtype).removeprefix('torch.')}"
    return "rows of the bias lie too far apart" if max(bias.stride()[-2:]) > FARTHEST else None


def on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor | None:
    """The attention on the CPU: over tiles, but not with so few tokens, as in windows, that calls take longer than
    products. None elsewhere, and for exporters, which are given the formula as it is written."""
    if q.device.type != "cpu" or not q.dtype == k.dtype == v.dtype or torch.compiler.is_exporting():
        return None
    few = max(q.shape[2], k.shape[2]) <= FEW
    if bias is not None:
        return None if few else relu_quadratic(q, k, v, mask, bias)
    if not few or q.dtype in relu_quadratic_cpu.HALF or mask is not None:
        return relu_quadratic(q, k, v, mask)
    scale = q.shape[3] ** -0.5 / k.shape[2]
    if len(q) > 1:
        return ((q @ k.mT).relu_() @ v).mul_(scale)
    weight = torch.bmm(q[0], k[0].mT).relu_()  # of one image the heads can be read where they lie
    return torch.baddbmm(weight.new_empty(1), weight, v[0], beta=0, alpha=scale)[None]


def home(q: Tensor) -> ModuleType:
    return relu_quadratic_launch if q.device.type != "cpu" or interpreted() else relu_quadratic_cpu


def relu_quadratic(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part. `bias` is anything that (batch, heads, queries,
    keys) can be made of by repeating, as in `Mechanism.forward`. Views of one packed projection get their gradients in
    one packed tensor.
    """
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    if not plain(q):
        return torch.ops.linvit.relu_quadratic.default(q, k, v, mask, bias)
    learned = (q, k, v) if bias is None else (q, k, v, bias)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned)):
        return home(q).forward(q, k, v, mask, bias)
    qkv = packed_source(q, k, v)
    return _Separate.apply(q, k, v, mask, bias) if qkv is None else _Packed.apply(qkv, (q, k, v), mask, bias)


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, mask, bias)
        return home(q).forward(q, k, v, mask, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, bias = ctx.saved_tensors
        dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
        d_bias = home(q).backward(grad, q, k, v, mask, dq, dk, dv, bias, ctx.needs_input_grad[4])
        return dq, dk, dv, None, d_bias


class _Packed(torch.autograd.Function):
    """`qkv` is packed in any shape; `views` are its q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, views: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(qkv, mask, bias)
        ctx.shape = views[0].shape
        return home(qkv).forward(*views, mask, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, mask, bias = ctx.saved_tensors
        batch, heads, tokens, dim = ctx.shape
        whole = qkv.view(batch, tokens, 3, heads, dim)
        d_qkv = torch.empty_like(whole)
        wanted = ctx.needs_input_grad[3]
        d_bias = home(qkv).backward(grad, *unpack(whole), mask, *unpack(d_qkv), bias, wanted)
        return d_qkv.view(qkv.shape), None, None, d_bias


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    return home(q).forward(q, k, v, mask, bias)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
    d_bias = home(q).backward(grad, q, k, v, mask, dq, dk, dv, bias, learned)
    return dq, dk, dv, q.new_empty(0) if d_bias is None else d_bias


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    return rows_like(v, q.shape[2])


def _fake_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Tensor | None, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = q.new_empty(0) if bias is None or not learned else bias.new_empty(bias.shape)
    return rows_like(q), rows_like(k), rows_like(v), d_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    learned = ctx.needs_input_grad[4]
    *found, d_bias = torch.ops.linvit.relu_quadratic_backward.default(grad, *ctx.saved_tensors, learned)
    return *found, None, d_bias if learned else None


library = torch.library.Library("linvit", "FRAGMENT")
library.define("relu_quadratic(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias) -> Tensor")
library.define(
    "relu_quadratic_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, bool learned) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
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
