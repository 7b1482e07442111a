"""Triton code of Mobile-Attention's backward pass; the shared pieces are in kernels.py.

With y = phi(q) · state, out = γ · y and γ = σ(Ī) / denominator, the competition's gradient needs Σ_n w · dw, which is
the product of the state and its gradient: no further pass over the tokens.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from linvit.kernels.approximate import exp, inverse, rough
from linvit.kernels.mobile import kernels
from linvit.kernels.tiles import settled


@triton.jit
def state_gradient_kernel(q, g, flow, final, partial, q_b, q_h, q_n, q_d, g_b, g_h, g_n, g_d,
                          channels, value_channels, batches, tokens_all, chunk, size, d_size, eps,
                          QD: tl.constexpr, GD: tl.constexpr, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
                          BLOCK: tl.constexpr, UNIT: tl.constexpr, ROW_SUM: tl.constexpr, KIND: tl.constexpr,
                          PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of state and sums of M heads, over one chunk of tokens."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    heads = channels // W
    ROUGH: tl.constexpr = rough(q.dtype.element_ty)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    q_b, q_h, q_n = kernels.strides(q_b, q_h, q_n, UNIT)
    g_b, g_h, g_n = kernels.strides(g_b, g_h, g_n, UNIT)
    state_ptr, sums_ptr, there = kernels.state_at(final + batch.to(tl.int64) * size, first, heads, W, V, M)
    sums = tl.load(sums_ptr, mask=there[:, None], other=0.0)[None, :, :]
    state = kernels.spread(tl.load(state_ptr, mask=there[:, None, None], other=0.0)).to(KIND)
    d_state = tl.zeros([M * W, M * V], tl.float32)
    d_sums = tl.zeros([BLOCK, M, W], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        ok = tokens < end
        x = kernels.tile(q, batch, tokens, ok, q_b, q_h, q_n, q_d, first, channels, QD, M, W)
        dy = kernels.rows(g, batch, tokens, ok, g_b, g_h, g_n, g_d, first // W * V, value_channels, GD, M * V).to(KIND)
        a = kernels.phi(x, first, heads, W, ROUGH)
        gate, below = kernels.gate_of(a, flow, batch, tokens, ok, tokens_all, sums, eps, ROW_SUM, W, ROUGH)
        gamma = gate * below
        if ROW_SUM:
            d_a = tl.dot(dy, tl.trans(state), input_precision=PRECISION)
            along = tl.sum(a * tl.reshape(d_a, [BLOCK, M, W]), 2)
            d_sums -= (along * gamma * below)[:, :, None] * a
        weighed = tl.reshape(a * gamma[:, :, None], [BLOCK, M * W]).to(KIND)
        d_state = settled((tl.dot(tl.trans(weighed), dy, d_state, input_precision=PRECISION),))[0]
    at = partial + (tl.program_id(1) * batches + batch).to(tl.int64) * d_size
    kernels.put_state(at, first, channels, d_state, W, V)
    _, d_sums_ptr, there = kernels.state_at(at, first, heads, W, V, M)
    tl.store(d_sums_ptr, tl.sum(d_sums, 0), mask=there[:, None])


@triton.jit
def pick(x, which, N: tl.constexpr):
    """Channel `which` of each head, (tokens, heads, 1): x is (tokens, heads, N) and stays where it is in registers."""
    return tl.sum(tl.where((tl.arange(0, N) == which)[None, None, :], x, 0.0), 2)[:, :, None]


@triton.jit
def rows_of_state(ptr, first, channels, row, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """state[:, row, :] as (1, M, V)."""
    value = tl.arange(0, M * V)
    channel = first + value // V * W + row
    x = tl.load(ptr + channel * V + value % V, mask=channel < channels, other=0.0)
    return tl.reshape(x, [1, M, V])


@triton.jit
def columns_of_state(ptr, first, channels, column, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """state[:, :, column] as (1, M, W)."""
    channel = first + tl.arange(0, M * W)
    return tl.reshape(tl.load(ptr + channel * V + column, mask=channel < channels, other=0.0), [1, M, W])


@triton.jit
def sums_of_state(ptr, first, channels, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """The sums over tokens beside the state, as (1, M, W)."""
    channel = first + tl.arange(0, M * W)
    return tl.reshape(tl.load(ptr + channels * V + channel, mask=channel < channels, other=0.0), [1, M, W])


@triton.jit
def times_state(a, ptr, first, channels, W: tl.constexpr, V: tl.constexpr):
    """a · state, head by head: (tokens, M, V)."""
    M: tl.constexpr = a.shape[1]
    y = pick(a, 0, W) * rows_of_state(ptr, first, channels, 0, M, W, V)
    for i in tl.static_range(1, W):
        y += pick(a, i, W) * rows_of_state(ptr, first, channels, i, M, W, V)
    return y


@triton.jit
def times_state_transposed(x, ptr, first, channels, W: tl.constexpr, V: tl.constexpr):
    """x · stateᵀ, head by head: (tokens, M, W)."""
    M: tl.constexpr = x.shape[1]
    y = pick(x, 0, V) * columns_of_state(ptr, first, channels, 0, M, W, V)
    for j in tl.static_range(1, V):
        y += pick(x, j, V) * columns_of_state(ptr, first, channels, j, M, W, V)
    return y


@triton.jit
def flat(x):
    return tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]])


@triton.jit
def query_side(a, g, flow, here, batch, tokens, ok, tokens_all, first, channels, value_channels, eps,
               g_b, g_h, g_n, g_d, GD: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
               ROW_SUM: tl.constexpr):  # fmt: skip
    """The output's gradient to phi(q), Ī and, where that is the denominator, I."""
    M: tl.constexpr = a.shape[1]
    sums = sums_of_state(here, first, channels, M, W, V)
    ROUGH: tl.constexpr = rough(g.dtype.element_ty)
    gate, below = kernels.gate_of(a, flow, batch, tokens, ok, tokens_all, sums, eps, ROW_SUM, W, ROUGH)
    gamma = gate * below
    dy = kernels.tile(g, batch, tokens, ok, g_b, g_h, g_n, g_d, first // W * V, value_channels, GD, M, V)
    d_a = times_state_transposed(dy, here, first, channels, W, V)
    d_gamma = tl.sum(a * d_a, 2)
    d_a *= gamma[:, :, None]
    d_gate = d_gamma * gamma * (1 - gate)
    d_below = -d_gamma * gamma * below
    if ROW_SUM:
        d_a += d_below[:, :, None] * sums
        d_below = tl.zeros_like(d_below)
    return d_a, d_gate, d_below


@triton.jit
def key_side(c, v, dv, by_in, here, d_here, batch, tokens, ok, keep, first, channels, value_channels, count, eps,
             v_b, v_h, v_n, v_d, dv_b, dv_n, VD: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
             ROW_SUM: tl.constexpr, CLAMP: tl.constexpr):  # fmt: skip
    """The state's gradient to phi(k) and Ō; writes dv."""
    M: tl.constexpr = c.shape[1]
    there = first // W + tl.arange(0, M) < channels // W
    level = tl.load(here + channels * (V + 1) + first // W + tl.arange(0, M), mask=there, other=0.0)
    mean = tl.zeros([1, M], tl.float32)
    for j in tl.static_range(V):
        ours = columns_of_state(here, first, channels, j, M, W, V)
        mean += tl.sum(ours * columns_of_state(d_here, first, channels, j, M, W, V), 2)
    flowing = tl.sum(c * by_in, 2) + eps * tl.sum(by_in, 2)
    clamped = tl.minimum(tl.maximum(flowing, -1.0), 1.0) if CLAMP else flowing
    weight = tl.where(keep[:, None] & there[None, :], exp(clamped - level[None, :]) * count, 0.0)
    x = kernels.tile(v, batch, tokens, keep, v_b, v_h, v_n, v_d, first // W * V, value_channels, VD, M, V)
    d_v = times_state(c, d_here, first, channels, W, V) * weight[:, :, None]
    kernels.put(dv, batch, tokens, ok, dv_b, dv_n, first // W * V, value_channels, flat(d_v))
    d_c = times_state_transposed(x, d_here, first, channels, W, V)
    d_weight = tl.sum(c * d_c, 2)
    d_c *= weight[:, :, None]
    if ROW_SUM:
        d_c += tl.where(keep[:, None, None], sums_of_state(d_here, first, channels, M, W, V), 0.0)
    d_flowing = weight * (d_weight - mean / count)
    if CLAMP:
        d_flowing = tl.where(tl.abs(flowing) <= 1, d_flowing, 0.0)
    return d_c, d_flowing


@triton.jit
def weighed(x, y, eps):
    """x, a number for each head, times y + eps."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i][:, :, None] * (y[i] + eps),)
    return out


@triton.jit
def gradient_kernel(q, k, v, g, flow, final, d_final, mask, counts, dq, dk, dv,
                    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
                    dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_n,
                    channels, value_channels, tokens_all, chunk, size, d_size, count, eps,
                    QD: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, GD: tl.constexpr,
                    W: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr, REST: tl.constexpr,
                    BLOCK: tl.constexpr, UNIT: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr):  # fmt: skip
    """dq, dk and dv of all heads, BLOCK tokens at a time over one chunk."""
    chunks = tl.cdiv(tokens_all, chunk)
    batch = tl.program_id(0) // chunks
    begin = tl.program_id(0) % chunks * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    q_b, q_h, q_n = kernels.strides(q_b, q_h, q_n, UNIT)
    k_b, k_h, k_n = kernels.strides(k_b, k_h, k_n, UNIT)
    v_b, v_h, v_n = kernels.strides(v_b, v_h, v_n, UNIT)
    g_b, g_h, g_n = kernels.strides(g_b, g_h, g_n, UNIT)
    dq_b, dq_h, dq_n = kernels.strides(dq_b, dq_h, dq_n, UNIT)
    dk_b, dk_h, dk_n = kernels.strides(dk_b, dk_h, dk_n, UNIT)
    dv_b, dv_h, dv_n = kernels.strides(dv_b, dv_h, dv_n, UNIT)
    if counts is not None:
        count = tl.load(counts + batch)
    here = final + batch.to(tl.int64) * size
    d_here = d_final + batch.to(tl.int64) * d_size
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        ok = tokens < end
        keep = kernels.kept(mask, batch, tokens, end, mask_b, mask_n)
        of_k = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 0, W)
        of_q = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 1, W)
        by_out = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 2, W)
        by_in = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 3, W)
        a = kernels.features(q, batch, tokens, ok, q_b, q_h, q_n, q_d, channels, QD, W, WIDE, PIECES, REST)
        c = kernels.features(k, batch, tokens, ok, k_b, k_h, k_n, k_d, channels, KD, W, WIDE, PIECES, REST)
        d_a, d_gate, d_in, d_c, d_flowing = (), (), (), (), ()
        for i in tl.static_range(len(a)):
            one, two, three = query_side(
                a[i], g, flow, here, batch, tokens, ok, tokens_all, i * WIDE, channels, value_channels, eps,
                g_b, g_h, g_n, g_d, GD, W, V, ROW_SUM,
            )  # fmt: skip
            d_a += (one,)
            d_gate += (two,)
            d_in += (three,)
            one, two = key_side(
                c[i], v, dv, by_in, here, d_here, batch, tokens, ok, keep, i * WIDE, channels, value_channels, count,
                eps, v_b, v_h, v_n, v_d, dv_b, dv_n, VD, W, V, ROW_SUM, CLAMP,
            )  # fmt: skip
            d_c += (one,)
            d_flowing += (two,)

        # Back through the flows, which couple the heads of a token: first Ī and Ō, then O and I.
        d_by_out = kernels.over_heads(weighed(d_gate, a, eps))
        d_by_in = kernels.over_heads(weighed(d_flowing, c, eps))
        d_outs, d_ins = (), ()
        for i in tl.static_range(len(a)):
            one_in = inverse(tl.sum((a[i] + eps) * of_k, 2))
            one_out = inverse(tl.sum((c[i] + eps) * of_q, 2))
            d_outs += (-tl.sum(d_by_out * c[i], 2) * (one_out * one_out),)
            d_ins += (d_in[i] - tl.sum(d_by_in * a[i], 2) * (one_in * one_in),)
        d_of_q, d_of_k = kernels.over_heads(weighed(d_outs, c, eps)), kernels.over_heads(weighed(d_ins, a, eps))
        for i in tl.static_range(len(a)):
            one_in = inverse(tl.sum((a[i] + eps) * of_k, 2))[:, :, None]
            one_out = inverse(tl.sum((c[i] + eps) * of_q, 2))[:, :, None]
            grad = d_a[i] + d_gate[i][:, :, None] * by_out + d_by_in * one_in + d_ins[i][:, :, None] * of_k + d_of_q
            kernels.put(dq, batch, tokens, ok, dq_b, dq_n, i * WIDE, channels, flat(grad * a[i] * (1 - a[i])))
            grad = d_c[i] + d_flowing[i][:, :, None] * by_in + d_by_out * one_out + d_outs[i][:, :, None] * of_q
            grad += d_of_k
            kernels.put(dk, batch, tokens, ok, dk_b, dk_n, i * WIDE, channels, flat(grad * c[i] * (1 - c[i])))
