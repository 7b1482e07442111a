"""Launching Mobile-Attention's kernels: how heads and tokens are cut into programs, by a rule and not by tuning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from linvit.kernels.linear_launch import Launch, processors, rows_like
from linvit.kernels.linear_plan import power_of_two

GROUP = 64  # channels that one program of the split kernels takes
BLOCK = 16  # tokens it takes at a time


@dataclass(frozen=True)
class Plan:
    """Sizes of one call. `width` and `value_width` are a small head's channels of q and of v."""

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


def plan(batch: int, channels: int, value_channels: int, tokens: int, small: int, processors: int) -> Plan:
    heads = channels // small
    value_width = value_channels // heads
    group = min(GROUP // max(small, value_width), power_of_two(heads))
    programs = batch * -(-heads // group)
    chunks = max(1, min(64, -(-4 * processors // programs), -(-tokens // (4 * BLOCK))))
    chunk = -(-tokens // (chunks * BLOCK)) * BLOCK
    return Plan(small, value_width, heads, group, -(-tokens // chunk), chunk)


def row_tiles(p: Plan, backward: bool) -> tuple[int, int]:
    """Tokens at a time and warps where a program takes all heads of a token.

    Forward, one warp to a row of up to 1,024 channels: sums over heads then need no shared memory, and instructions are
    what it waits for. Backward has many more numbers to hold and takes eight channels a thread.
    """
    channels = p.every * max(p.width, p.value_width)
    if backward:
        warps = 4 if channels <= 512 else 8
        return max(1, 256 * warps // channels), warps
    return max(1, 1024 // channels), max(1, channels // 1024)


@dataclass(frozen=True)
class Launches:
    plan: Plan
    flows: Launch
    keys: Launch
    combine: Launch | None
    queries: Launch


@lru_cache(maxsize=4096)
def prepare_forward(
    q: torch.Size, v: torch.Size, q_strides: tuple[int, ...], k_strides: tuple[int, ...], v_strides: tuple[int, ...],
    mask_strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, masked: bool,
    small: int, released: bool, eps: float,
) -> Launches:  # fmt: skip
    from linvit.kernels import mobile_triton as kernels

    batch, tokens, head_dim, value_dim = q[0], q[2], q[3], v[3]
    channels, value_channels = q[1] * head_dim, v[1] * value_dim
    p = plan(batch, channels, value_channels, tokens, small, processors(device))
    block, warps = row_tiles(p, False)
    values: tuple[Any, ...] = (*q_strides, *k_strides, channels, tokens, eps, head_dim, p.every, p.width, block)
    flows = Launch(kernels.flows_kernel, (batch * -(-tokens // block), 1, 1), values, num_warps=warps)
    whole = p.chunks == 1
    size = p.size if whole else p.size + p.heads
    values = (*k_strides, *v_strides, *mask_strides, channels, value_channels, batch, tokens, p.chunk, size)
    values += (float(tokens), eps, head_dim, value_dim, p.group, p.width, p.value_width, BLOCK, released, whole)
    keys = Launch(kernels.keys_kernel, (batch * p.groups, p.chunks, 1), values, num_warps=4)
    combine = None
    if not whole:
        values = (channels, batch, p.chunks, size, float(tokens), p.group, p.width, p.value_width)
        combine = Launch(kernels.combine_kernel, (batch * p.groups, 1, 1), values, num_warps=1)
    out_strides = (tokens * value_channels, value_channels)
    values = (*q_strides, *out_strides, channels, value_channels, tokens, p.size, eps)
    values += (head_dim, p.group, p.width, p.value_width, 2 * BLOCK, not released)
    queries = Launch(kernels.queries_kernel, (batch * p.groups, -(-tokens // (2 * BLOCK)), 1), values, num_warps=4)
    return Launches(p, flows, keys, combine, queries)


@lru_cache(maxsize=4096)
def prepare_backward(
    q: torch.Size, v: torch.Size, strides: tuple[tuple[int, ...], ...], d_strides: tuple[int, ...],
    mask_strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, masked: bool,
    small: int, released: bool, eps: float,
) -> tuple[Plan, Launch, Launch]:  # fmt: skip
    """`strides` are those of q, k, v and the output's gradient."""
    from linvit.kernels import mobile_gradient_triton as kernels

    batch, tokens, head_dim, value_dim = q[0], q[2], q[3], v[3]
    channels, value_channels = q[1] * head_dim, v[1] * value_dim
    p = plan(batch, channels, value_channels, tokens, small, processors(device))
    values: tuple[Any, ...] = (*strides[0], *strides[3], channels, value_channels, batch, tokens, p.chunk)
    values += (p.size, p.d_size, eps, head_dim, value_dim, p.group, p.width, p.value_width, BLOCK, not released)
    state = Launch(kernels.state_gradient_kernel, (batch * p.groups, p.chunks, 1), values, num_warps=4)
    block, warps = row_tiles(p, True)
    chunk = 16 * block
    values = (*(s for of in strides for s in of), *d_strides, *mask_strides, channels, value_channels, tokens, chunk)
    values += (p.size, p.d_size, float(tokens), eps, head_dim, value_dim, p.every, p.width, p.value_width, block)
    values += (not released, released)
    inputs = Launch(kernels.gradient_kernel, (batch * -(-tokens // chunk), 1, 1), values, num_warps=warps)
    return p, state, inputs


def counts_of(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.sum(-1).float()


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, small: int, released: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the flows of each token, and the state of each image."""
    masks = (0, 0) if mask is None else mask.stride()
    how = prepare_forward(
        q.shape, v.shape, q.stride(), k.stride(), v.stride(), masks, q.dtype, q.device, mask is not None,
        small, released, eps,
    )  # fmt: skip
    p, batch, counts = how.plan, q.shape[0], counts_of(mask)
    flow = torch.empty((batch, q.shape[2], 4, p.width), dtype=torch.float32, device=q.device)
    how.flows(q, k, flow)
    state = flow.new_empty(batch, p.size)
    partial = state if how.combine is None else flow.new_empty(p.chunks, batch, p.size + p.heads)
    how.keys(k, v, flow, mask, counts, partial)
    if how.combine is not None:
        how.combine(partial, state, counts)
    out = rows_like(v)
    how.queries(q, flow, state, out)
    return out, flow, state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, flow: Tensor, state: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, small: int, released: bool, eps: float,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, whose channels are dense over all heads."""
    masks = (0, 0) if mask is None else mask.stride()
    d_strides = tuple(s for d in (dq, dk, dv) for s in (d.stride(0), d.stride(2)))
    p, of_state, of_inputs = prepare_backward(
        q.shape, v.shape, (q.stride(), k.stride(), v.stride(), grad.stride()), d_strides, masks, q.dtype, q.device,
        mask is not None, small, released, eps,
    )  # fmt: skip
    partial = state.new_empty(p.chunks, q.shape[0], p.d_size)
    of_state(q, grad, flow, state, partial)
    d_state = partial[0] if p.chunks == 1 else partial.sum(0)
    of_inputs(q, k, v, grad, flow, state, d_state, mask, counts_of(mask), dq, dk, dv)
