"""Mobile-Attention as one op, forward and backward: `mobile(q, k, v, small)`, linvit::mobile.

q, k and v are a host's `(batch, heads, tokens, head_dim)` in any strides; their channels are cut into heads of `small`.
Sums are in float32 and in fixed order: the same inputs give the same bits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.kernels import fused
from linvit.kernels.fused import Given, Launch, Strides, launch_cache, power_of_two, processors, rows_like, signature_of
from linvit.kernels.operators import register

SMALL = (1, 2, 4, 8)  # channels of a small head that fit the tiles
WIDEST = 2048  # channels of a token that fit a program's registers
GROUP = 64  # channels that one program of the split kernels takes
BLOCK = 16  # tokens it takes at a time


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

    @property
    def every(self) -> int:
        """All small heads, filled up to a power of two."""
        return power_of_two(self.heads)


def cut_of(batch: int, channels: int, value_channels: int, tokens: int, small: int, processors: int) -> Cut:
    heads = channels // small
    value_width = value_channels // heads
    group = min(GROUP // max(small, value_width), power_of_two(heads))
    programs = batch * -(-heads // group)
    chunks = max(1, min(64, -(-4 * processors // programs), -(-tokens // (4 * BLOCK))))
    chunk = -(-tokens // (chunks * BLOCK)) * BLOCK
    return Cut(small, value_width, heads, group, -(-tokens // chunk), chunk)


def row_tiles(cut: Cut, backward: bool) -> tuple[int, int]:
    """Tokens at a time and warps where a program takes all heads of a token.

    Forward, one warp to a row of up to 1,024 channels: sums over heads then need no shared memory, and instructions are
    what it waits for. Backward has many more numbers to hold and takes eight channels a thread.
    """
    channels = cut.every * max(cut.width, cut.value_width)
    if backward:
        warps = 4 if channels <= 512 else 8
        return max(1, 256 * warps // channels), warps
    return max(1, 1024 // channels), max(1, channels // 1024)


@launch_cache
def prepare_forward(
    signature: tuple[Any, ...], mask_strides: Strides | None, options: Options
) -> tuple[Cut, Launch, Launch, Launch | None, Launch]:
    """The kernels of the flows, the keys, the combination of their chunks and the queries."""
    from linvit.kernels.mobile import kernels

    q, _, v, q_strides, k_strides, v_strides, *_, device, _, _ = signature
    batch, tokens, head_dim, value_dim = q[0], q[2], q[3], v[3]
    channels, value_channels = q[1] * head_dim, v[1] * value_dim
    small, released, eps = options
    cut = cut_of(batch, channels, value_channels, tokens, small, processors(device))
    heads = (cut.group, cut.width, cut.value_width)
    block, warps = row_tiles(cut, False)
    values: tuple[Any, ...] = (*q_strides, *k_strides, channels, tokens, eps, head_dim, cut.every, cut.width, block)
    flows = Launch(kernels.flows_kernel, (batch * -(-tokens // block), 1, 1), values, num_warps=warps)
    whole = cut.chunks == 1
    size = cut.size if whole else cut.size + cut.heads
    values = (*k_strides, *v_strides, *(mask_strides or (0, 0)), channels, value_channels, batch, tokens, cut.chunk)
    values += (size, float(tokens), eps, head_dim, value_dim, *heads, BLOCK, released, whole)
    keys = Launch(kernels.keys_kernel, (batch * cut.groups, cut.chunks, 1), values, num_warps=4)
    combine = None
    if not whole:
        values = (channels, batch, cut.chunks, size, float(tokens), *heads)
        combine = Launch(kernels.combine_kernel, (batch * cut.groups, 1, 1), values, num_warps=1)
    values = (*q_strides, tokens * value_channels, value_channels, channels, value_channels, tokens, cut.size, eps)
    values += (head_dim, *heads, 2 * BLOCK, not released)
    queries = Launch(kernels.queries_kernel, (batch * cut.groups, -(-tokens // (2 * BLOCK)), 1), values, num_warps=4)
    return cut, flows, keys, combine, queries


@launch_cache
def prepare_backward(
    signature: tuple[Any, ...], mask_strides: Strides | None, options: Options, grad_strides: Strides,
    d_strides: Strides,
) -> tuple[Cut, Launch, Launch]:  # fmt: skip
    """The kernels of the state's gradient and the inputs'; `d_strides` are of batches and tokens of dq, dk and dv."""
    from linvit.kernels.mobile import gradients

    q, _, v, q_strides, k_strides, v_strides, *_, device, _, _ = signature
    batch, tokens, head_dim, value_dim = q[0], q[2], q[3], v[3]
    channels, value_channels = q[1] * head_dim, v[1] * value_dim
    small, released, eps = options
    cut = cut_of(batch, channels, value_channels, tokens, small, processors(device))
    values: tuple[Any, ...] = (*q_strides, *grad_strides, channels, value_channels, batch, tokens, cut.chunk, cut.size)
    values += (cut.d_size, eps, head_dim, value_dim, cut.group, cut.width, cut.value_width, BLOCK, not released)
    of_state = Launch(gradients.state_gradient_kernel, (batch * cut.groups, cut.chunks, 1), values, num_warps=4)
    block, warps = row_tiles(cut, True)
    chunk = 16 * block
    values = (*q_strides, *k_strides, *v_strides, *grad_strides, *d_strides, *(mask_strides or (0, 0)))
    values += (channels, value_channels, tokens, chunk, cut.size, cut.d_size, float(tokens), eps)
    values += (head_dim, value_dim, cut.every, cut.width, cut.value_width, block, not released, released)
    of_inputs = Launch(gradients.gradient_kernel, (batch * -(-tokens // chunk), 1, 1), values, num_warps=warps)
    return cut, of_state, of_inputs


def counts_of(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.sum(-1).float()


def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options, save: bool, signature: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the flows of each token, and the state of each image."""
    (mask,) = given
    masks = None if mask is None else mask.stride()
    cut, flows, keys, combine, queries = prepare_forward(signature, masks, options)
    batch, counts = q.shape[0], counts_of(mask)
    flow = torch.empty((batch, q.shape[2], 4, cut.width), dtype=torch.float32, device=q.device)
    flows(q, k, flow)
    state = flow.new_empty(batch, cut.size)
    partial = state if combine is None else flow.new_empty(cut.chunks, batch, cut.size + cut.heads)
    keys(k, v, flow, mask, counts, partial)
    if combine is not None:
        combine(partial, state, counts)
    out = rows_like(v)
    queries(q, flow, state, out)
    return out, flow, state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, given: Given,
    saved: list[Tensor], options: Options, wanted: tuple[bool, ...],
) -> tuple[()]:  # fmt: skip
    """Writes dq, dk and dv, whose channels are dense over all heads."""
    (mask,), (flow, state) = given, saved
    d_strides = tuple(s for d in (dq, dk, dv) for s in (d.stride(0), d.stride(2)))
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


def flops(q: torch.Size, v: torch.Size, options: Options) -> int:
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
