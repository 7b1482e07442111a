"""Triton code of the flows and the keys in one launch, for images of few tokens and for many images.

A program has all heads of its tokens and so needs nobody else's flows; phi(k), which these are made of, is still in
registers when the keys compete. A thread keeps to its channels and adds up its own tokens: no products of matrices,
which would be zero for the most part, and no barrier before the end.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from linvit.kernels.approximate import exp
from linvit.kernels.mobile import kernels
from linvit.kernels.tiles import strides


@triton.jit
def nothing(N: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr,
            PIECES: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Sums of no tokens yet: a state for each value of a head, sums of phi(k), totals of the softmax, its levels."""
    state, sums, total, top = (), (), (), ()
    for i in tl.static_range(N):
        for _ in tl.static_range(V):
            state += (tl.zeros([BLOCK, (WIDE if i < PIECES else REST) // W, W], tl.float32),)
        sums += (tl.zeros([BLOCK, (WIDE if i < PIECES else REST) // W, W], tl.float32),)
        total += (tl.zeros([BLOCK, (WIDE if i < PIECES else REST) // W], tl.float32),)
        top += (tl.zeros([(WIDE if i < PIECES else REST) // W], tl.float32),)
    return state, sums, total, top


@triton.jit
def flowing_of(c, by_in, eps, CLAMP: tl.constexpr):
    """Ō"""
    flowing = tl.sum(c * by_in, 2) + eps * tl.sum(by_in, 2)
    if CLAMP:
        flowing = tl.minimum(tl.maximum(flowing, -1.0), 1.0)
    return flowing


@triton.jit
def more(state, sums, total, top, c, by_in, v, batch, tokens, keep, v_b, v_h, v_n, v_d, value_channels, eps,
         VD: tl.constexpr, V: tl.constexpr, CLAMP: tl.constexpr):  # fmt: skip
    """The sums with these tokens. `top`, None for zeros, are the levels of the softmax."""
    states, sumss, totals = (), (), ()
    first: tl.constexpr = c[0].shape[1] * V
    for i in tl.static_range(len(c)):
        x = kernels.tile(v, batch, tokens, keep, v_b, v_h, v_n, v_d, i * first, value_channels, VD, c[i].shape[1], V)
        flowing = flowing_of(c[i], by_in, eps, CLAMP)
        if top is not None:
            flowing -= top[i][None, :]
        weight = tl.where(keep[:, None], exp(flowing), 0.0)
        weighed = c[i] * weight[:, :, None]
        for j in tl.static_range(V):
            states += (state[i * V + j] + weighed * kernels.one_of(x, j),)
        sumss += (sums[i] + tl.where(keep[:, None, None], c[i], 0.0),)
        totals += (total[i] + weight,)
    return states, sumss, totals


@triton.jit
def sources_kernel(q, k, v, flow, mask, partial, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
                   mask_b, mask_n, batches, tokens_all, chunk, size, eps,
                   CHANNELS: tl.constexpr, QD: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
                   W: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr, REST: tl.constexpr,
                   BLOCK: tl.constexpr, UNIT: tl.constexpr, CLAMP: tl.constexpr):  # fmt: skip
    """The four vectors of a chunk of tokens, and its states, sums and softmax."""
    chunks = tl.cdiv(tokens_all, chunk)
    batch, number = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    begin = number * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    q_b, q_h, q_n = strides(q_b, q_h, q_n, UNIT)
    k_b, k_h, k_n = strides(k_b, k_h, k_n, UNIT)
    v_b, v_h, v_n = strides(v_b, v_h, v_n, UNIT)
    heads: tl.constexpr = CHANNELS // W
    N: tl.constexpr = PIECES + (REST > 0)
    state, sums, total, top = nothing(N, V, BLOCK, W, WIDE, PIECES, REST)
    most = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        ok = tokens < end
        keep = kernels.kept(mask, batch, tokens, end, mask_b, mask_n)
        a = kernels.features(q, batch, tokens, ok, q_b, q_h, q_n, q_d, CHANNELS, QD, W, WIDE, PIECES, REST)
        c = kernels.features(k, batch, tokens, ok, k_b, k_h, k_n, k_d, CHANNELS, KD, W, WIDE, PIECES, REST)
        by_in = kernels.put_flows(flow, a, c, batch, tokens, ok, tokens_all, eps)
        most = tl.maximum(most, tl.where(ok, tl.sum(tl.sum(by_in, 2), 1), 0.0))
        state, sums, total = more(
            state, sums, total, None, c, by_in, v, batch, tokens, keep, v_b, v_h, v_n, v_d, heads * V, eps, VD, V, CLAMP
        )
    if not CLAMP:
        hot = tl.max(most, 0) > kernels.CALM
        if hot:  # again with maxima, which are hardly ever needed: see keys_kernel
            tl.debug_barrier()
            state, sums, total, top = nothing(N, V, BLOCK, W, WIDE, PIECES, REST)
            for start in tl.range(begin, end, BLOCK):
                tokens = start + tl.arange(0, BLOCK)
                keep = kernels.kept(mask, batch, tokens, end, mask_b, mask_n)
                c = kernels.features(k, batch, tokens, keep, k_b, k_h, k_n, k_d, CHANNELS, KD, W, WIDE, PIECES, REST)
                by_in = kernels.flow_of(flow, batch, tokens, keep, tokens_all, 3, W)
                higher = ()
                for i in tl.static_range(N):
                    flowing = tl.where(keep[:, None], flowing_of(c[i], by_in, eps, CLAMP), 0.0)
                    higher += (tl.maximum(top[i], tl.max(flowing, 0)),)
                top = higher
            for start in tl.range(begin, end, BLOCK):
                tokens = start + tl.arange(0, BLOCK)
                keep = kernels.kept(mask, batch, tokens, end, mask_b, mask_n)
                c = kernels.features(k, batch, tokens, keep, k_b, k_h, k_n, k_d, CHANNELS, KD, W, WIDE, PIECES, REST)
                by_in = kernels.flow_of(flow, batch, tokens, keep, tokens_all, 3, W)
                state, sums, total = more(
                    state, sums, total, top, c, by_in, v, batch, tokens, keep, v_b, v_h, v_n, v_d, heads * V, eps,
                    VD, V, CLAMP,
                )  # fmt: skip
    at = partial + (number * batches + batch).to(tl.int64) * size
    for i in tl.static_range(N):
        head = i * (WIDE // W) + tl.arange(0, total[i].shape[1])
        channel = head[:, None] * W + tl.arange(0, W)[None, :]
        there = channel < CHANNELS
        for j in tl.static_range(V):
            tl.store(at + channel * V + j, tl.sum(state[i * V + j], 0), mask=there)
        tl.store(at + CHANNELS * V + channel, tl.sum(sums[i], 0), mask=there)
        ends = at + CHANNELS * (V + 1) + head
        tl.store(ends, top[i], mask=head < heads)
        tl.store(ends + heads, tl.sum(total[i], 0), mask=head < heads)
