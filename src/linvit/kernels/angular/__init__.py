"""Angular attention, `weight_ij = 1 − θ_ij/π` and each row divided by its sum, as one op: linvit::angular.

The weights exist tile by tile, in registers, and are computed again for the gradients, so memory is linear in the
tokens. Sums are in float32, in fixed order: the same inputs give the same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.kernels import fused, relu_quadratic
from linvit.kernels.fused import (
    Given,
    Launch,
    Strides,
    in_units,
    launch_cache,
    rows_like,
    shared_memory,
    signature_of,
)
from linvit.kernels.linear.layout import ENOUGH, pieces
from linvit.kernels.operators import register
from linvit.kernels.relu_quadratic import Tiles

FEW = 64  # keys up to which every program measures them all, which spares a launch and reading them twice
MEASURED = 128  # keys that a program of that launch takes


class Options(NamedTuple):
    eps: float  # the least length that a query or key is divided by, and what row sums have more


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Triton kernels cannot serve these tensors, or None where they can."""
    return relu_quadratic.why_not(q, k, v)


def tiles(which: str, width: int, itemsize: int) -> Tiles:
    """The rule for block sizes: of those that keep everything in registers, those with the most scores to a row."""
    if itemsize > 2:
        return Tiles(64, 32, 4, 2) if width <= 64 else Tiles(32, 32 if width <= 128 else 16, 4, 1)
    if width > 128:
        return Tiles(64, 32, 8, 2)
    if which == "keys":
        return Tiles(64, 32, 4 if width < 128 else 8, 3)
    if width > 64:
        return Tiles(64, 64, 4, 2) if which == "forward" and width < 128 else Tiles(64, 32, 4, 3)
    return Tiles(64, 64, 4, 3)


@launch_cache
def prepare(
    which: str, signature: tuple[Any, ...], mask_strides: Strides | None, options: Options,
    strides: tuple[Strides, ...], saves: bool = False,
) -> Launch:  # fmt: skip
    """The launch of one kernel, "forward", "queries", "keys" or "lengths"; `strides` are of its other tensors. Forward
    is another kernel where it `saves` the row sums."""
    from linvit.kernels.angular import kernels

    q, _, v, q_strides, k_strides, v_strides, dtype, *_, device, _, _ = signature
    (batch, heads, queries, head_dim), (keys, value_dim) = q, v[2:]
    (width, rest), (value_width, value_rest) = pieces(head_dim, 16), pieces(value_dim, 16)
    least = max(options.eps, fused.LEAST)
    if which == "lengths":
        unit, in_order = in_units(dtype.itemsize, k_strides)
        programs = batch * heads * -(-keys // MEASURED)
        values: tuple[Any, ...] = (*in_order, heads, keys, least, head_dim, width, rest, MEASURED, unit)
        return Launch(kernels.lengths_kernel, (programs, 1, 1), values, num_warps=4)
    columns = max(width + rest, value_width + value_rest)
    tokens = keys if which == "keys" else queries
    t = tiles(which, columns, dtype.itemsize)
    if shared_memory(device) < ENOUGH and columns > 64:
        t = t._replace(stages=max(1, t.stages - 1), own=min(t.own, 64 // dtype.itemsize) if columns > 128 else t.own)
    m, n = (t.walk, t.own) if which == "keys" else (t.own, t.walk)
    usual_sum = keys / 2  # about what rows sum to: what is divided by that too keeps its size, as float16 needs
    kernel, number = {
        "forward": (kernels.forward_kernel, options.eps),
        "queries": (kernels.query_gradient_kernel, usual_sum),
        "keys": (kernels.key_gradient_kernel, usual_sum),
    }[which]
    kind, _, precision = fused.operands(dtype, device.type == "cpu")
    unit, in_order = in_units(dtype.itemsize, q_strides, k_strides, v_strides, *strides)
    values = (*in_order, *(mask_strides or (0, 0)), heads, queries, keys, least, number)
    values += (head_dim, value_dim, width, rest, value_width, value_rest, m, n, unit, kind, precision)
    programs = batch * heads * -(-tokens // t.own)
    return Launch(kernel, (programs, 1, 1), values, num_warps=t.warps, num_stages=t.stages)


def numbers(of: Tensor) -> Tensor:
    """Room for a number for each token of each head."""
    return torch.empty(of.shape[:3], dtype=torch.float32, device=of.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options, save: bool, signature: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """The output as a view of `(batch, queries, heads, value_dim)`, row sums, and one over the keys' lengths."""
    (mask,), lengths = given, None
    mask_strides = None if mask is None else mask.stride()
    if k.shape[2] > FEW:
        lengths = numbers(k)
        prepare("lengths", signature, None, options, ())(k, lengths)
    out, sums = rows_like(v, q.shape[2]), numbers(q) if save else None
    launch = prepare("forward", signature, mask_strides, options, (out.stride()[:3],), save)
    launch(q, k, v, out, sums, lengths, mask)
    return out, sums, lengths if save else None


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, given: Given,
    saved: list[Tensor | None], options: Options, wanted: tuple[bool, ...],
) -> tuple[()]:  # fmt: skip
    """Writes dq, dk and dv, whose last dimension is dense."""
    (mask,), (out, sums, lengths) = given, saved
    assert out is not None
    signature, mask_strides = signature_of(q, k, v), None if mask is None else mask.stride()
    divided, less, inverse = rows_like(out), numbers(q), numbers(q)
    strides = (grad.stride(), *(t.stride()[:3] for t in (out, dq, divided)))
    launch = prepare("queries", signature, mask_strides, options, strides)
    launch(q, k, v, grad, out, dq, divided, less, inverse, sums, lengths, mask)
    launch = prepare("keys", signature, mask_strides, options, tuple(t.stride()[:3] for t in (divided, dk, dv)))
    launch(q, k, v, divided, less, inverse, dk, dv, mask)
    return ()


def saved_sizes(q: Tensor, v: Tensor, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch, heads, queries, _ = q.shape
    keys = v.shape[2]
    return (batch, heads, queries), (batch, heads, keys) if keys > FEW else (0,)


op = register(
    fused.FusedOp(
        "angular", Options, forward, backward,
        flops=relu_quadratic.flops, backward_flops=relu_quadratic.backward_flops, saved=("sums", "lengths"),
        saved_sizes=saved_sizes, lazy=True, keep_output=True,
    )
)  # fmt: skip


def angular(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part.
    """
    return op(q, k, v, (mask,), Options(eps))
