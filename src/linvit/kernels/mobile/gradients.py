"""Triton code of Mobile-Attention's backward pass; the forward pass and the shared pieces are in kernels.py.

With y = phi(q) · state, out = γ · y and γ = σ(Ī) / denominator, the competition's gradient needs Σ_n w · dw, which is
the product of the state and its gradient: no further pass over the tokens.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from linvit.kernels.mobile import kernels


@triton.jit
def state_gradient_kernel(q, g, flow, final, partial, q_b, q_h, q_n, q_d, g_b, g_h, g_n, g_d,
                          channels, value_channels, batches, tokens_all, chunk, size, d_size, eps,
                          D: tl.constexpr, VD: tl.constexpr, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
                          BLOCK: tl.constexpr, ROW_SUM: tl.constexpr):  # fmt: skip
    """Gradients of state and sums of M heads, over one chunk of tokens."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    heads = channels // W
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    here = final + batch.to(tl.int64) * size
    sums = kernels.sums_of_state(here, first, channels, M, W, V)
    d_state = tl.zeros([BLOCK, M, W, V], tl.float32)
    d_sums = tl.zeros([BLOCK, M, W], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        ok = tokens < end
        a = kernels.phi(
            kernels.tile(q, batch, tokens, ok, q_b, q_h, q_n, q_d, first, channels, D, M, W), first, heads, W
        )
        dy = kernels.tile(g, batch, tokens, ok, g_b, g_h, g_n, g_d, first // W * V, value_channels, VD, M, V)
        gate, below = kernels.gate_of(a, flow, batch, tokens, ok, tokens_all, sums, eps, ROW_SUM, W)
        gamma = gate / below
        if ROW_SUM:
            along = tl.sum(dy * kernels.times_state(a, here, first, channels, W, V), 2)
            d_sums -= (along * gamma / below)[:, :, None] * a
        d_state += (a * gamma[:, :, None])[:, :, :, None] * dy[:, :, None, :]
    at = partial + (tl.program_id(1) * batches + batch).to(tl.int64) * d_size
    d_state_ptr, d_sums_ptr, there = kernels.state_at(at, first, heads, W, V, M)
    tl.store(d_state_ptr, tl.sum(d_state, 0), mask=there[:, None, None])
    tl.store(d_sums_ptr, tl.sum(d_sums, 0), mask=there[:, None])


@triton.jit
def gradient_kernel(q, k, v, g, flow, final, d_final, mask, counts, dq, dk, dv,
                    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
                    dq_b, dq_n, dk_b, dk_n, dv_b, dv_n, mask_b, mask_n,
                    channels, value_channels, tokens_all, chunk, size, d_size, count, eps,
                    D: tl.constexpr, VD: tl.constexpr, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
                    BLOCK: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr):  # fmt: skip
    """dq, dk and dv of all heads, BLOCK tokens at a time over one chunk."""
    chunks = tl.cdiv(tokens_all, chunk)
    batch = tl.program_id(0) // chunks
    begin = tl.program_id(0) % chunks * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    heads = channels // W
    if counts is not None:
        count = tl.load(counts + batch)
    here = final + batch.to(tl.int64) * size
    d_here = d_final + batch.to(tl.int64) * d_size
    there = tl.arange(0, M) < heads
    level = tl.load(here + heads * W * (V + 1) + tl.arange(0, M), mask=there, other=0.0)
    sums = kernels.sums_of_state(here, 0, channels, M, W, V)
    d_sums = kernels.sums_of_state(d_here, 0, channels, M, W, V)
    mean = tl.zeros([1, M], tl.float32)
    for j in tl.static_range(V):
        both = kernels.columns_of_state(here, 0, channels, j, M, W, V) * kernels.columns_of_state(
            d_here, 0, channels, j, M, W, V
        )
        mean += tl.sum(both, 2)
    mean /= count
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        ok = tokens < end
        keep = ok
        if mask is not None:
            at = mask + batch.to(tl.int64) * mask_b + tokens.to(tl.int64) * mask_n
            keep = ok & tl.load(at, mask=ok, other=0).to(tl.int1)
        a = kernels.phi(kernels.tile(q, batch, tokens, ok, q_b, q_h, q_n, q_d, 0, channels, D, M, W), 0, heads, W)
        c = kernels.phi(kernels.tile(k, batch, tokens, ok, k_b, k_h, k_n, k_d, 0, channels, D, M, W), 0, heads, W)
        gate, below = kernels.gate_of(a, flow, batch, tokens, ok, tokens_all, sums, eps, ROW_SUM, W)
        gamma = gate / below

        # The output's gradient to kernels.phi(q), Ī and the denominator.
        dy = kernels.tile(g, batch, tokens, ok, g_b, g_h, g_n, g_d, 0, value_channels, VD, M, V)
        d_a = kernels.times_state_transposed(dy, here, 0, channels, W, V)
        d_gamma = tl.sum(a * d_a, 2)
        d_a *= gamma[:, :, None]
        d_gate = d_gamma * gamma * (1 - gate)
        d_below = -d_gamma * gamma / below
        if ROW_SUM:
            d_a += d_below[:, :, None] * sums
            d_in = tl.zeros_like(d_below)
        else:
            d_in = d_below

        # The state's gradient to kernels.phi(k), v and the competition.
        of_k = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 0, W)
        of_q = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 1, W)
        by_out = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 2, W)
        by_in = kernels.flow_of(flow, batch, tokens, ok, tokens_all, 3, W)
        flowing = tl.sum((c + eps) * by_in, 2)
        clamped = tl.minimum(tl.maximum(flowing, -1.0), 1.0) if CLAMP else flowing
        weight = tl.where(keep[:, None] & there[None, :], tl.exp(clamped - level[None, :]) * count, 0.0)
        x = kernels.tile(v, batch, tokens, keep, v_b, v_h, v_n, v_d, 0, value_channels, VD, M, V)
        d_v = kernels.times_state(c, d_here, 0, channels, W, V) * weight[:, :, None]
        kernels.put(dv, batch, tokens, ok, dv_b, dv_n, 0, value_channels, d_v)
        d_c = kernels.times_state_transposed(x, d_here, 0, channels, W, V)
        d_weight = tl.sum(c * d_c, 2)
        d_c *= weight[:, :, None]
        if ROW_SUM:
            d_c += tl.where(keep[:, None, None], d_sums, 0.0)
        d_flowing = weight * (d_weight - mean)
        if CLAMP:
            d_flowing = tl.where(tl.abs(flowing) <= 1, d_flowing, 0.0)

        # Back through the flows, which couple the heads of a token: first Ī and Ō, then O and I.
        one_in = (1 / tl.sum((a + eps) * of_k, 2))[:, :, None]
        one_out = (1 / tl.sum((c + eps) * of_q, 2))[:, :, None]
        d_by_out = tl.sum(d_gate[:, :, None] * (a + eps), 1)[:, None, :]
        d_by_in = tl.sum(d_flowing[:, :, None] * (c + eps), 1)[:, None, :]
        d_out = -tl.sum(d_by_out * c * (one_out * one_out), 2)
        d_in -= tl.sum(d_by_in * a * (one_in * one_in), 2)
        d_a += d_gate[:, :, None] * by_out + d_by_in * one_in + d_in[:, :, None] * of_k
        d_c += d_flowing[:, :, None] * by_in + d_by_out * one_out + d_out[:, :, None] * of_q
        d_a += tl.sum(d_out[:, :, None] * (c + eps), 1)[:, None, :]
        d_c += tl.sum(d_in[:, :, None] * (a + eps), 1)[:, None, :]
        kernels.put(dq, batch, tokens, ok, dq_b, dq_n, 0, channels, d_a * a * (1 - a))
        kernels.put(dk, batch, tokens, ok, dk_b, dk_n, 0, channels, d_c * c * (1 - c))
