"""ReLU-quadratic attention, `relu(q · kᵀ / √d + bias) · v / keys`, without the N×N matrix: linvit::relu_quadratic.

On a GPU it is Triton's (kernels.py), on the CPU plain PyTorch over tiles (cpu.py). Both recompute the scores in the
backward pass, so memory is linear in the tokens. Sums are in float32, in fixed order: the same inputs give the same
bits. A bias is read tile by tile, in the shape it has: `(1, heads, N, N)` is shared by all images, and fewer images
than there are come again in turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.kernels.fused import DTYPES, FusedOp, interpreted, unserved
from linvit.kernels.operators import register
from linvit.kernels.relu_quadratic import cpu, launch

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
    if not few or q.dtype in cpu.HALF or mask is not None:
        return relu_quadratic(q, k, v, mask)
    scale = q.shape[3] ** -0.5 / k.shape[2]
    if len(q) > 1:
        return ((q @ k.mT).relu_() @ v).mul_(scale)
    weight = torch.bmm(q[0], k[0].mT).relu_()  # of one image the heads can be read where they lie
    return torch.baddbmm(weight.new_empty(1), weight, v[0], beta=0, alpha=scale)[None]


class Options(NamedTuple):
    """It has none."""


def on_triton(q: Tensor) -> bool:
    return q.device.type != "cpu" or interpreted()


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, options: Options, save: bool,
    signature: tuple[Any, ...],
) -> tuple[Tensor]:  # fmt: skip
    return (launch.forward(q, k, v, mask, bias, signature) if on_triton(q) else cpu.forward(q, k, v, mask, bias),)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, mask: Tensor | None,
    bias: Tensor | None, saved: list[Tensor], options: Options, wanted: bool,
) -> Tensor | None:  # fmt: skip
    run = launch.backward if on_triton(q) else cpu.backward
    return run(grad, q, k, v, dq, dk, dv, mask, bias, wanted)


def flops(q: torch.Size, v: torch.Size, options: Options) -> int:
    """2 per multiply-accumulate of the two products."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * v[2] * (head_dim + v[3])


def backward_flops(q: torch.Size, v: torch.Size, options: Options) -> int:
    """What the gradients need: the scores again, dq and dk, dv and its transpose. Work done twice is not counted."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * v[2] * (3 * head_dim + 2 * v[3])


op = register(
    FusedOp(
        "relu_quadratic", Options, forward, backward,
        flops=flops, backward_flops=backward_flops, learned="bias", cpu=True,
    )
)  # fmt: skip


def relu_quadratic(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part. `bias` is anything that (batch, heads, queries,
    keys) can be made of by repeating, as in `Mechanism.forward`.
    """
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    return op(q, k, v, mask, bias, Options())
