"""Mobile-Attention as one op, forward and backward: `mobile(q, k, v, small)`, linvit::mobile.

q, k and v are a host's `(batch, heads, tokens, head_dim)` in any strides; their channels are cut into heads of `small`.
Sums are in float32 and in fixed order: the same inputs give the same bits.
"""

from dataclasses import dataclass, replace
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
    power_of_two,
    processors,
    rows_like,
    signature_of,
)
from linvit.kernels.operators import register

SMALL = (1, 2, 4, 8)  # channels of a small head that fit the tiles
WIDEST = 2048  # channels of a token that fit a program's registers
GROUP = 64  # channels that one program of the split kernels takes
BLOCK = 32  # tokens of a chunk of theirs are a multiple of this
SPLIT = 2  # programs for each processor that tokens are split for
WAVES = 8  # programs for each processor that are enough where a program can also take more tokens
LEAST = 1e-12  # of eps: heads that only fill a tile have no other flow, and the kernels divide by two at once
INSIDE = 40  # chunks up to which the queries' programs combine them themselves
AT_ONCE = 128, 32  # of them that a program loads, times a small head's channels: where programs are few, and many
TOGETHER = 768, 2  # channels, and a small head's values, up to which one launch for flows and keys has the registers
FEW = 1024  # tokens up to which it is best for a single image, too
RESIDENT = 3  # of its programs run on a processor at once, by
REGISTERS = 168  # registers of a thread


class Options(NamedTuple):
    small: int  # channels of a small head
    released: bool  # the released code's variant, not the poster's
    eps: float


@dataclass(frozen=True)
class Cut:
    """How one call's heads and tokens are cut. `width` and `value_width` are a small head's channels of q and of v."""

    width: int
    value_width: int
    heads: int
    group: int  # small heads of one program in the split kernels
    chunks: int
    chunk: int  # tokens of one program there

    @property
    def groups(self) -> int:
        return -(-self.heads // self.group)

    @property
    def d_size(self) -> int:
        """Numbers of an image's state and sums, and so of their gradient."""
        return self.heads * self.width * (self.value_width + 1)

    @property
    def size(self) -> int:
        """The same with the levels of the softmax; while it is in parts, a total beside each level."""
        return self.d_size + self.heads


class Tiles(NamedTuple):
    """Tokens that a program takes at a time, its warps and pipeline stages."""

    block: int
    warps: int
    stages: int = 1
    wide: int = 0  # channels of a piece where a program takes all heads of a token


def tiles_of(which: str, channels: int) -> Tiles:
    """The rule for "flows", "keys", "queries", "state" and "inputs", the last two of the backward pass.

    Where a program takes all heads of a token, pieces of up to 256 channels let a warp have a token for itself: sums
    over heads then need no barrier. Backward has more to hold, and at most 12 channels of it fit a thread.
    """
    if which == "flows":
        return Tiles(4, 4, wide=128 if channels % 256 and channels < 512 else 256)
    if which == "inputs":
        warps = max(1, power_of_two(-(-channels // 384)))
        return Tiles(max(1, 4 // warps), max(4, warps), wide=256 * warps)
    return {"keys": Tiles(32, 4, 3), "queries": Tiles(16, 4), "state": Tiles(32, 4, 3)}[which]


def pieces(channels: int, small: int, wide: int) -> tuple[int, int, int]:
    """All channels of a token in tiles: so many columns, so many times, and the columns of the rest."""
    wide = min(wide, 1 << (channels.bit_length() - 1))
    left = channels % wide
    return wide, channels // wide, max(small, power_of_two(left)) if left else 0


def cut_of(batch: int, channels: int, value_channels: int, tokens: int, small: int, processors: int) -> Cut:
    heads = channels // small
    value_width = value_channels // heads
    group = GROUP // max(small, value_width)
    programs = batch * -(-heads // group)
    chunks = max(1, min(64, -(-SPLIT * processors // programs), -(-tokens // (2 * BLOCK))))
    chunk = -(-tokens // (chunks * BLOCK)) * BLOCK
    return Cut(small, value_width, heads, group, -(-tokens // chunk), chunk)


def together_of(cut: Cut, batch: int, channels: int, tokens: int, processors: int) -> tuple[Cut, Tiles] | None:
    """How flows and keys are cut where one launch does both, with all heads of a token; None where two are better.

    A thread has 24 channels of a token at most, and as few threads as that allows add them up.
    """
    if channels > TOGETHER[0] or cut.value_width > TOGETHER[1] or (tokens > FEW and batch * INSIDE < processors):
        return None
    wide = min(256, max(cut.width, power_of_two(-(-channels // 3))))
    block = min(32, 1024 // wide)
    warps = 8 if batch * -(-tokens // block) < SPLIT * processors else 4
    block *= warps // 4
    chunks = max(1, min(INSIDE, RESIDENT * processors // batch))
    chunk = -(-tokens // (chunks * block)) * block
    return replace(cut, chunks=-(-tokens // chunk), chunk=chunk), Tiles(block, warps, wide=wide)


def dense(strides: Strides, head_dim: int) -> int:
    """What the kernels divide a channel's number by: nothing, where heads lie side by side as one."""
    return 0 if strides[1] == head_dim * strides[3] else head_dim


@launch_cache
def prepare_forward(
    signature: tuple[Any, ...], mask_strides: Strides | None, options: Options, out_strides: Strides
) -> tuple[Cut, tuple[Launch, ...], Launch | None, Launch]:
    """The kernels of the flows and the keys, in one or two launches, the combination of many chunks and the queries."""
    from linvit.kernels.mobile import kernels, sources
    from linvit.kernels.mobile import queries as of_queries

    q, _, v, q_strides, k_strides, v_strides, dtype, *_, device, _, _ = signature
    batch, tokens, head_dim, value_dim = q[0], q[2], q[3], v[3]
    channels, value_channels = q[1] * head_dim, v[1] * value_dim
    small, released, eps = options
    cut, eps = cut_of(batch, channels, value_channels, tokens, small, processors(device)), max(eps, LEAST)
    together = together_of(cut, batch, channels, tokens, processors(device))
    cut = cut if together is None else together[0]
    heads, size = (cut.group, cut.width, cut.value_width), cut.size + cut.heads
    _, kind, precision = fused.operands(dtype, device.type == "cpu")
    q_dim, k_dim, v_dim = (
        dense(one, dim) for one, dim in ((q_strides, head_dim), (k_strides, head_dim), (v_strides, value_dim))
    )
    masks = mask_strides or (0, 0)
    values: tuple[Any, ...]

    if together is not None:
        t = together[1]
        unit, in_order = in_units(dtype.itemsize, q_strides, k_strides, v_strides)
        values = (*in_order, *masks, batch, tokens, cut.chunk, size, eps, channels, q_dim, k_dim, v_dim)
        values += (small, cut.value_width, *pieces(channels, small, t.wide), t.block, unit, released)
        limit = REGISTERS if t.warps == 4 else None  # with more there is one program for a processor
        grid = (batch * cut.chunks, 1, 1)
        before: tuple[Launch, ...] = (Launch(sources.sources_kernel, grid, values, num_warps=t.warps, maxnreg=limit),)
    else:
        unit, in_order = in_units(dtype.itemsize, q_strides, k_strides)
        t = tiles_of("flows", channels)
        values = (*in_order, channels, tokens, eps, q_dim, k_dim, small)
        values += (*pieces(channels, small, t.wide), t.block, unit)
        flows = Launch(kernels.flows_kernel, (batch * -(-tokens // t.block), 1, 1), values, num_warps=t.warps)

        unit, in_order = in_units(dtype.itemsize, k_strides, v_strides)
        values = (*in_order, *masks, channels, value_channels, batch, tokens, cut.chunk, size, eps)
        t = tiles_of("keys", channels)
        values += (k_dim, v_dim, *heads, t.block, unit, released, kind, precision)
        grid = (batch * cut.groups, cut.chunks, 1)
        before = flows, Launch(kernels.keys_kernel, grid, values, num_warps=t.warps, num_stages=t.stages)

    t = tiles_of("queries", channels)
    programs = batch * cut.groups * -(-tokens // t.block)
    chunk = t.block * min(16, -(-programs // processors(device)))
    grid = (batch * cut.groups, -(-tokens // chunk), 1)
    at_once = AT_ONCE[grid[0] * grid[1] > SPLIT * processors(device)] // min(small, cut.value_width)
    at_once = min(at_once, power_of_two(cut.chunks))
    combine = None
    if cut.chunks > INSIDE:
        values = (channels, batch, cut.chunks, size, cut.size, float(tokens), *heads, at_once)
        combine = Launch(of_queries.combine_kernel, (batch * cut.groups, 1, 1), values, num_warps=4)

    unit, in_order = in_units(dtype.itemsize, q_strides, out_strides)
    values = (*in_order, channels, value_channels, batch, tokens, chunk, cut.chunks, size, cut.size, float(tokens), eps)
    values += (q_dim, *heads, t.block, unit, not released, at_once)
    queries = Launch(of_queries.queries_kernel, grid, values, num_warps=t.warps)
    return cut, before, combine, queries


@launch_cache
def prepare_backward(
    signature: tuple[Any, ...], mask_strides: Strides | None, options: Options, grad_strides: Strides,
    d_strides: tuple[Strides, ...],
) -> tuple[Cut, Launch, Launch]:  # fmt: skip
    """The kernels of the state's gradient and the inputs'; `d_strides` are of batches, heads and tokens of theirs."""
    from linvit.kernels.mobile import gradients

    q, _, v, q_strides, k_strides, v_strides, dtype, *_, device, _, _ = signature
    batch, tokens, head_dim, value_dim = q[0], q[2], q[3], v[3]
    channels, value_channels = q[1] * head_dim, v[1] * value_dim
    small, released, eps = options
    cut, eps = cut_of(batch, channels, value_channels, tokens, small, processors(device)), max(eps, LEAST)
    _, kind, precision = fused.operands(dtype, device.type == "cpu")
    dims = tuple(dense(one, head_dim) for one in (q_strides, k_strides))
    value_dims = tuple(dense(one, value_dim) for one in (v_strides, grad_strides))

    unit, in_order = in_units(dtype.itemsize, q_strides, grad_strides)
    values: tuple[Any, ...] = (*in_order, channels, value_channels, batch, tokens, cut.chunk, cut.size, cut.d_size)
    values += (eps, dims[0], value_dims[1], cut.group, cut.width, cut.value_width)
    t = tiles_of("state", channels)
    values += (t.block, unit, not released, kind, precision)
    grid = (batch * cut.groups, cut.chunks, 1)
    of_state = Launch(gradients.state_gradient_kernel, grid, values, num_warps=t.warps, num_stages=t.stages)

    unit, in_order = in_units(dtype.itemsize, q_strides, k_strides, v_strides, grad_strides, *d_strides)
    t = tiles_of("inputs", channels)
    chunk = t.block * max(1, min(16, batch * tokens // (t.block * WAVES * processors(device))))
    values = (*in_order, *(mask_strides or (0, 0)))
    values += (channels, value_channels, tokens, chunk, cut.size, cut.d_size, float(tokens), eps)
    values += (*dims, *value_dims, small, cut.value_width, *pieces(channels, small, t.wide))
    values += (t.block, unit, not released, released)
    of_inputs = Launch(gradients.gradient_kernel, (batch * -(-tokens // chunk), 1, 1), values, num_warps=t.warps)
    return cut, of_state, of_inputs


def counts_of(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.sum(-1).float()


def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options, save: bool, signature: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the flows of each token, and the state of each image."""
    (mask,) = given
    masks = None if mask is None else mask.stride()
    out = rows_like(v)
    cut, before, combine, queries = prepare_forward(signature, masks, options, out.stride()[:3])
    batch, counts = q.shape[0], counts_of(mask)
    flow = torch.empty((batch, q.shape[2], 4, cut.width), dtype=torch.float32, device=q.device)
    state, partial = flow.new_empty(batch, cut.size), flow.new_empty(cut.chunks, batch, cut.size + cut.heads)
    if len(before) == 1:
        before[0](q, k, v, flow, mask, partial)
    else:
        before[0](q, k, flow)
        before[1](k, v, flow, mask, partial)
    if combine is not None:
        combine(partial, state, counts)
    queries(q, flow, None if combine else partial, state, counts, out)
    return out, flow, state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, given: Given,
    saved: list[Tensor], options: Options, wanted: tuple[bool, ...],
) -> tuple[()]:  # fmt: skip
    """Writes dq, dk and dv, whose channels are dense over all heads."""
    (mask,), (flow, state) = given, saved
    d_strides = tuple(d.stride()[:3] for d in (dq, dk, dv))
    masks = None if mask is None else mask.stride()
    cut, of_state, of_inputs = prepare_backward(signature_of(q, k, v), masks, options, grad.stride(), d_strides)
    partial = state.new_empty(cut.chunks, q.shape[0], cut.d_size)
    of_state(q, grad, flow, state, partial)
    d_state = partial[0] if cut.chunks == 1 else partial.sum(0)
    of_inputs(q, k, v, grad, flow, state, d_state, mask, counts_of(mask), dq, dk, dv)
    return ()


def why_not(q: Tensor, k: Tensor, v: Tensor, small: int) -> str | None:
    """Why the kernels cannot serve these tensors, or None where they can."""
    why = fused.unserved(q, k, v)
    if why is not None:
        return why
    channels, value_channels = q.shape[1] * q.shape[3], v.shape[1] * v.shape[3]
    if small not in SMALL:
        return f"small heads of {small} channels have no kernel, only those of {', '.join(map(str, SMALL))}"
    if channels % small or value_channels * small % channels or value_channels * small // channels not in SMALL:
        return f"the {value_channels} channels of v do not divide into {channels // small} heads of 1, 2, 4 or 8"
    if max(channels, value_channels) > WIDEST:
        return f"{max(channels, value_channels)} channels of a token are more than {WIDEST}"
    return None


def flops(q: torch.Size, v: torch.Size, options: Options, given: Given) -> int:
    """2 per multiply-accumulate: both products, and four or five dot products of a token's channels."""
    batch, heads, tokens, head_dim = q
    dots = (4 if options.released else 5) * heads * head_dim
    return 2 * batch * tokens * (2 * v[1] * v[3] * options.small + dots)


def saved_sizes(q: Tensor, v: Tensor, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the flows of each token and the state of each image."""
    batch, heads, tokens, head_dim = q.shape
    small_heads = heads * head_dim // options.small
    numbers = small_heads * (options.small * (v.shape[1] * v.shape[3] // small_heads + 1) + 1)
    return (batch, tokens, 4, options.small), (batch, numbers)


op = register(
    fused.FusedOp(
        "mobile", Options, forward, backward,
        flops=flops, saved=("flow", "state"), saved_sizes=saved_sizes,
    )
)  # fmt: skip


def mobile(
    q: Tensor, k: Tensor, v: Tensor, small: int, *, released: bool = False, eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mobile-Attention with its flows and head competition, the poster's variant or the released code's.

    `mask`, boolean (batch, tokens), is true for the keys that take part.
    """
    return op(q, k, v, (mask,), Options(small, released, eps))
