"""Triton code of Mobile-Attention's queries, which first make one state of their image's chunks.

A head's few channels times its state are fewer multiplications than a product of matrices with the heads' states on its
diagonal has instructions beside it: operands are laid out anew, and the state is spread.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from linvit.kernels.approximate import exp, rough
from linvit.kernels.mobile.kernels import gate_of, one_of, phi, put, state_at, tile
from linvit.kernels.tiles import strides


@triton.jit
def combined(partial, batch, first, channels, batches, chunks, size, count, M: tl.constexpr, W: tl.constexpr,
             V: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """The chunks' states into one, in order: state, divided by the softmax's total, sums, and the softmax's level."""
    heads = channels // W
    state = tl.zeros([M, W, V], tl.float32)
    sums = tl.zeros([M, W], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.zeros([M], tl.float32)
    here = first // W + tl.arange(0, M) < heads
    for start in tl.range(0, chunks, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)
        at = partial + ((number * batches + batch).to(tl.int64) * size)[:, None]
        ok = (number < chunks)[:, None]
        row = tl.arange(0, M * W * V)
        more = tl.load(at + first * V + row[None, :], mask=ok & (first * V + row < channels * V)[None, :], other=0.0)
        states = tl.reshape(more, [AT_ONCE, M, W, V])
        row = tl.arange(0, M * W)
        more = tl.load(at + channels * V + first + row[None, :], mask=ok & (first + row < channels)[None, :], other=0.0)
        sumss = tl.reshape(more, [AT_ONCE, M, W])
        ends = at + channels * (V + 1) + (first // W + tl.arange(0, M))[None, :]
        theirs = tl.load(ends, mask=ok & here[None, :], other=0.0)
        totals = tl.load(ends + heads, mask=ok & here[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(theirs, 0))
        ours, other = exp(top - higher), exp(theirs - higher[None, :])
        state = state * ours[:, None, None] + tl.sum(states * other[:, :, None, None], 0)
        sums += tl.sum(sumss, 0)
        total = total * ours + tl.sum(totals * other, 0)
        top = higher
    total = tl.where(here, total, 1.0)
    return state * (count / total)[:, None, None], sums, top + tl.log(total)


@triton.jit
def finish_state(final, batch, first, channels, size, state, sums, level):
    M: tl.constexpr = state.shape[0]
    W: tl.constexpr = state.shape[1]
    V: tl.constexpr = state.shape[2]
    here = final + batch.to(tl.int64) * size
    state_ptr, sums_ptr, there = state_at(here, first, channels // W, W, V, M)
    tl.store(state_ptr, state, mask=there[:, None, None])
    tl.store(sums_ptr, sums, mask=there[:, None])
    tl.store(here + channels * (V + 1) + first // W + tl.arange(0, M), level, mask=there)


@triton.jit
def combine_kernel(partial, final, counts, channels, batches, chunks, size, final_size, count,
                   M: tl.constexpr, W: tl.constexpr, V: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """Where there are many chunks; otherwise the queries' programs do it, each again."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    if counts is not None:
        count = tl.load(counts + batch)
    state, sums, level = combined(partial, batch, first, channels, batches, chunks, size, count, M, W, V, AT_ONCE)
    finish_state(final, batch, first, channels, final_size, state, sums, level)


@triton.jit
def queries_kernel(q, flow, partial, final, counts, out, q_b, q_h, q_n, q_d, o_b, o_h, o_n, channels, value_channels,
                   batches, tokens_all, chunk, chunks, size, final_size, count, eps,
                   QD: tl.constexpr, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
                   UNIT: tl.constexpr, ROW_SUM: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """The output of M heads over a chunk of tokens. Without `partial` the state is final already."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    heads = channels // W
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    q_b, q_h, q_n = strides(q_b, q_h, q_n, UNIT)
    o_b, o_h, o_n = strides(o_b, o_h, o_n, UNIT)
    ROUGH: tl.constexpr = rough(q.dtype.element_ty)
    if partial is None:
        state_ptr, sums_ptr, there = state_at(final + batch.to(tl.int64) * final_size, first, heads, W, V, M)
        state = tl.load(state_ptr, mask=there[:, None, None], other=0.0)
        sums = tl.load(sums_ptr, mask=there[:, None], other=0.0)
    else:
        if counts is not None:
            count = tl.load(counts + batch)
        state, sums, level = combined(partial, batch, first, channels, batches, chunks, size, count, M, W, V, AT_ONCE)
        if tl.program_id(1) == 0:
            finish_state(final, batch, first, channels, final_size, state, sums, level)
    state = tl.permute(state, (0, 2, 1))
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        ok = tokens < end
        a = phi(tile(q, batch, tokens, ok, q_b, q_h, q_n, q_d, first, channels, QD, M, W), first, heads, W, ROUGH)
        gate, below = gate_of(a, flow, batch, tokens, ok, tokens_all, sums[None, :, :], eps, ROW_SUM, W, ROUGH)
        y = one_of(a, 0) * tl.reshape(one_of(state, 0), [1, M, V])
        for i in tl.static_range(1, W):
            y += one_of(a, i) * tl.reshape(one_of(state, i), [1, M, V])
        y = tl.reshape(y * (gate * below)[:, :, None], [BLOCK, M * V])
        put(out, batch, tokens, ok, o_b, o_n, first // W * V, value_channels, y)
