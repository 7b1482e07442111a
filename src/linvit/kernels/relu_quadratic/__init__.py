"""ReLU-quadratic attention, `relu(q · kᵀ / √d + bias) · v / keys`, without the N×N matrix: linvit::relu_quadratic.

On a GPU it is Triton's (kernels.py), on the CPU plain PyTorch over tiles (cpu.py). Both recompute the scores in the
backward pass, so memory is linear in the tokens. Sums are in float32, in fixed order: the same inputs give the same
bits. A bias is read tile by tile, in the shape it has: `(1, heads, N, N)` is shared by all images, and fewer images
than there are come again in turn.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.kernels import fused
from linvit.kernels.fused import (
    Given,
    Launch,
    Strides,
    in_units,
    launch_cache,
    processors,
    rows_like,
    shared_memory,
    signature_of,
)
from linvit.kernels.linear.layout import ENOUGH, pieces
from linvit.kernels.operators import register
from linvit.kernels.relu_quadratic import cpu

WIDEST = 256  # channels of a head that fit a program's registers
FARTHEST = 2**23  # numbers between rows of a bias, of which a tile has up to 128
FEW = 64  # tokens up to which the CPU does better without tiles
MANY = 2048  # tokens from which the wider of two good blocks wins; below, less is lost at the ragged end
WAVES = 4  # programs for each processor that are enough to keep it busy


def why_not(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the Triton kernels cannot serve these tensors, or None where they can."""
    why = fused.unserved(q, k, v)
    if why is not None:
        return why
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads of {max(q.shape[3], v.shape[3])} channels are wider than {WIDEST}"
    return None if bias is None else why_not_bias(bias, q.device)


def why_not_bias(bias: Tensor, device: torch.device) -> str | None:
    """The same of a bias: pointers to another device's memory must not reach a kernel."""
    if bias.device != device:
        return f"the bias is on {bias.device}, q, k and v are on {device}"
    if bias.dtype not in fused.DTYPES:
        return f"the bias is {str(bias.dtype).removeprefix('torch.')}"
    return "rows of the bias lie too far apart" if max(bias.stride()[-2:]) > FARTHEST else None


def on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor | None:
    """The attention on the CPU: over tiles, but not with so few tokens, as in windows, that calls take longer than
    products. None elsewhere, for empty tensors, and for exporters and transforms, which are given the formula as it is
    written."""
    if q.device.type != "cpu" or not q.dtype == k.dtype == v.dtype or fused.exporting() or fused.transformed():
        return None
    if 0 in (*q.shape, *v.shape):
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


class Tiles(NamedTuple):
    """Rows of the block a program owns, rows of the blocks it walks over, warps and pipeline stages."""

    own: int
    walk: int
    warps: int
    stages: int


def tiles(which: str, width: int, itemsize: int, tokens: int, few: bool) -> Tiles:
    """The rule for block sizes; `few` is for calls whose larger blocks would not fill the chip, or lack registers.

    Measured on an H200 in bfloat16. What counts is that accumulators stay in registers: 64 rows to a warpgroup.
    """
    if itemsize > 2:
        return Tiles(64, 32, 4, 2) if width <= 64 else Tiles(32, 32, 4, 1) if width <= 128 else Tiles(16, 16, 4, 1)
    if width > 128:
        return Tiles(64, 32, 4, 2) if which != "keys" else Tiles(64, 32, 8, 2)
    if which == "bias":
        return Tiles(64, 32, 4, 2)
    if 64 < width < 128:
        if which == "forward":
            return Tiles(64, 32, 4, 3) if few else Tiles(128, 64, 4, 3)
        return Tiles(64, 64, 4, 2 if which == "keys" else 3)
    if width > 64:
        wide = {"forward": Tiles(64, 64, 4, 3), "keys": Tiles(64, 32, 4, 3), "queries": Tiles(128, 32, 8, 3)}
        return wide[which]
    if which == "forward":
        return Tiles(128 if not few and (width < 64 or tokens >= MANY) else 64, 64, 4, 3)
    if which == "keys" and width == 64:
        return Tiles(64, 64 if tokens >= MANY else 32, 4, 4)
    return Tiles(64, 64, 4, 3)


@launch_cache
def prepare(
    which: str, signature: tuple[Any, ...], masked: bool, biased: torch.dtype | None, strides: tuple[Strides, ...],
    extras: Strides, repeats: int = 1, share: int = 1,
) -> Launch:  # fmt: skip
    """The launch of one kernel, "forward", "keys", "queries" or "bias"; `strides` are of its other tensors, in order.

    `extras` are those of mask and bias. `biased` is the bias's type, `repeats` how many images have the same one, of
    which a program of the last kernel adds up `share`.
    """
    from linvit.kernels.relu_quadratic import kernels

    q, _, v, q_strides, k_strides, v_strides, dtype, *_, device, _, _ = signature
    (batch, heads, queries, head_dim), (keys, value_dim) = q, v[2:]
    (width, rest), (value_width, value_rest) = pieces(head_dim, 16), pieces(value_dim, 16)
    columns = max(width + rest, value_width + value_rest)
    tokens = keys if which == "keys" else queries
    few = biased is not None or batch * heads * -(-tokens // 128) < 2 * processors(device)
    t = tiles(which, columns, dtype.itemsize, tokens, few)
    if shared_memory(device) < ENOUGH and columns > 64:
        t = t._replace(stages=max(1, t.stages - 1), own=min(t.own, 32) if columns > 128 else t.own)
    m, n = (t.walk, t.own) if which == "keys" else (t.own, t.walk)
    scale = head_dim**-0.5
    # The power of two below 1/√d, so that scaling is exact; what is left of 1/√d joins the factor at the end.
    prescale = 2.0 ** math.floor(math.log2(scale)) if dtype == torch.float16 else 1.0
    # With a bias scores are scaled before the ReLU, so what they weigh is not scaled after it.
    mean = 1.0 / (1 if masked else keys)
    weighed = mean if biased else scale * mean / prescale
    kernel, *numbers = {
        "forward": (kernels.forward_kernel, prescale, scale / prescale, weighed),
        "keys": (kernels.key_gradient_kernel, prescale, scale / prescale, scale * mean, weighed),
        "queries": (kernels.query_gradient_kernel, scale, scale * mean),
        "bias": (kernels.bias_gradient_kernel, repeats, share, scale, mean),
    }[which]
    kind, _, precision = fused.operands(dtype, device.type == "cpu")
    unit, in_order = in_units(dtype.itemsize, q_strides, k_strides, v_strides, *strides)
    constants: tuple[Any, ...] = (head_dim, value_dim, width, rest, value_width, value_rest)
    constants += (m, n, unit, kind, precision)
    programs = batch * heads * -(-tokens // t.own)
    if which == "bias":
        programs = batch // repeats * -(-repeats // share) * heads * -(-queries // m) * -(-keys // n)
    constants += (prescale != 1,) if which in ("forward", "keys") else ()
    values = (*in_order, *extras, heads, queries, keys, *numbers, *constants)
    return Launch(kernel, (programs, 1, 1), values, num_warps=t.warps, num_stages=t.stages)


class Options(NamedTuple):
    """It has none."""


def on_triton(q: Tensor) -> bool:
    return q.device.type != "cpu" or fused.interpreted()


def inverse_of(mask: Tensor | None) -> Tensor | None:
    """One over the keys that take part, of each image."""
    return None if mask is None else 1 / mask.sum(-1).clamp_min(1).float()


def extras(mask: Tensor | None, bias: Tensor | None) -> tuple[int, ...]:
    """Strides of what need not be there, and after how many images a bias comes again; a dimension it shares has no
    stride."""
    strides = (0, 0) if mask is None else mask.stride()
    if bias is None:
        return (*strides, 0, 0, 0, 0, 1)
    shared = (stride if size > 1 else 0 for stride, size in zip(bias.stride(), bias.shape, strict=True))
    return *strides, *shared, len(bias)


def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options, save: bool, signature: tuple[Any, ...]
) -> tuple[Tensor]:
    """The output as a view of `(batch, queries, heads, value_dim)`, which is what the output projection reads."""
    mask, bias = given
    if not on_triton(q):
        return (cpu.forward(q, k, v, mask, bias),)
    out = rows_like(v, q.shape[2])
    kinds = (mask is not None, None if bias is None else bias.dtype)
    launch = prepare("forward", signature, *kinds, (out.stride()[:3],), extras(mask, bias))
    launch(q, k, v, out, mask, inverse_of(mask), bias)
    return (out,)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, given: Given,
    saved: list[Tensor], options: Options, wanted: tuple[bool, ...],
) -> tuple[Tensor | None]:  # fmt: skip
    """Writes dq, dk and dv, whose last dimension is dense, and returns the bias's gradient where that is wanted."""
    mask, bias = given
    if not on_triton(q):
        return (cpu.backward(grad, q, k, v, dq, dk, dv, mask, bias, wanted[0]),)
    signature, inverse, others = signature_of(q, k, v), inverse_of(mask), extras(mask, bias)
    kinds = (mask is not None, None if bias is None else bias.dtype)
    launch = prepare("keys", signature, *kinds, (grad.stride(), dk.stride()[:3], dv.stride()[:3]), others)
    launch(q, k, v, grad, dk, dv, mask, inverse, bias)
    launch = prepare("queries", signature, *kinds, (grad.stride(), dq.stride()[:3]), others)
    launch(q, k, v, grad, dq, mask, inverse, bias)
    if bias is None or not wanted[0]:
        return (None,)
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    repeats = batch // len(bias)
    share = share_of(repeats, len(bias) * heads * -(-queries // 64) * -(-keys // 32), processors(q.device))
    shape = (len(bias), -(-repeats // share), heads, queries, keys)
    parts = torch.empty(shape, dtype=torch.float32, device=q.device)
    launch = prepare("bias", signature, *kinds, (grad.stride(),), others, repeats, share)
    launch(q, k, v, grad, bias, mask, inverse, parts)
    return (parts.sum(1).sum_to_size(bias.shape).to(bias.dtype),)


def share_of(images: int, tiles: int, processors: int) -> int:
    """How many images that share a bias a program adds up: the most that leaves programs enough. Each share takes
    memory for its sum, and the sums are added in the end."""
    return -(-images // min(images, -(-WAVES * processors // tiles)))


def flops(q: torch.Size, v: torch.Size, options: Options, given: Given) -> int:
    """2 per multiply-accumulate of the two products."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * v[2] * (head_dim + v[3])


def backward_flops(q: torch.Size, v: torch.Size, options: Options, given: Given) -> int:
    """What the gradients need: the scores again, dq and dk, dv and its transpose. Work done twice is not counted."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * queries * v[2] * (3 * head_dim + 2 * v[3])


op = register(
    fused.FusedOp(
        "relu_quadratic", Options, forward, backward,
        flops=flops, backward_flops=backward_flops, learned=("bias",), cpu=True,
    )
)  # fmt: skip


def relu_quadratic(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part. `bias` is anything that (batch, heads, queries,
    keys) can be made of by repeating, as in `Mechanism.forward`.
    """
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    return op(q, k, v, (mask, bias), Options())
