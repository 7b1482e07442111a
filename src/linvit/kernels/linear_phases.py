# mypy: disable-error-code="no-untyped-def"
"""Linear attention in Triton: two phases forward and two backward, of which the kernels are made.

One program serves G heads side by side, so that small heads still read whole memory lines: their features stand in the
columns of one tile, `state = phi(k)ᵀ · v` is one matrix product, and its blocks off the diagonal are dropped.

    keys phase             state, Σ phi(k), Σ v       reads k, v
    queries phase          out                        reads q
    query gradient phase   dq, and the gradients of state and sums   reads q, d out
    key gradient phase     dk, dv                     reads k, v

Each tensor is read or written once in a direction (k once more before a softmax over tokens, for its largest numbers).
Forward and backward kernels run both phases in one program, over all tokens, or over all tokens first and then one
chunk; or each phase is a kernel of its own with the tokens split over programs and their partial states added in fixed
order. All strides are free; token offsets are 64-bit.
"""

import triton
import triton.language as tl

from linvit.kernels.linear_tiles import (
    averaged,
    diagonal,
    feature_gradient,
    feature_map,
    head_sums,
    kept,
    key_features,
    load,
    over_tokens,
    own_column,
    settled,
    spread,
    store,
    weighted_sum,
)


@triton.jit
def keys_phase(k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, feature_eps,
               FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CONSTANT: tl.constexpr, PADDED: tl.constexpr,
               G: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """state = Σ phi(k)ᵀ · v, key_sum = Σ phi(k), value_sum = Σ v and the number of keys, over tokens begin … end."""
    BLOCK: tl.constexpr = k_tile.shape[0]
    C: tl.constexpr = k_tile.shape[1]
    V: tl.constexpr = v_tile.shape[1]
    state = tl.zeros([C, V], tl.float32)
    key_sums = tl.zeros([C, 16], tl.float32)
    value_sum = tl.zeros([V], tl.float32)
    count = tl.zeros([V], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = kept(mask, mask_n, tokens, end)
        k = load(k_tile, start, k_n, keep, k_ok, PADDED)
        v = load(v_tile, start, v_n, keep, v_ok, PADDED)
        f = tl.trans(key_features(k.to(tl.float32), keep & k_ok, shift, feature_eps, FEATURE, G).to(OPERAND))
        if ROW_SUM or over_tokens(FEATURE):
            key_sums = tl.dot(f, tl.full([BLOCK, 16], 1.0, OPERAND), key_sums, input_precision=PRECISION)
        state = settled(tl.dot(f, v.to(OPERAND), state, input_precision=PRECISION))
        if CONSTANT:
            value_sum += tl.sum(v.to(tl.float32), 0)
            count += tl.sum(keep.to(tl.float32))
    return diagonal(state, G), tl.sum(key_sums, 1) * 0.0625, value_sum, count


@triton.jit
def row_sums(f, ok, key_sum, count, constant, eps, CLAMP: tl.constexpr, CONSTANT: tl.constexpr, G: tl.constexpr):
    """What the rows are divided by, (rows, G); one in rows that do not exist."""
    total = head_sums(f * key_sum[None, :], G)
    if CONSTANT:
        total += constant * tl.max(count)
    total = tl.maximum(total, eps) if CLAMP else total + eps
    return tl.where(ok, total, 1.0)


@triton.jit
def queries_phase(q_tile, v_tile, out_tile, mask, q_n, v_n, out_n, mask_n, begin, end, q_ok, v_ok,
                  state, key_sum, value_sum, count, constant, scale, eps, feature_eps, own, norm_eps,
                  FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, CONSTANT: tl.constexpr,
                  OWN: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
                  COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """out for the queries begin … end."""
    BLOCK: tl.constexpr = q_tile.shape[0]
    V: tl.constexpr = state.shape[1]
    state = state.to(COMPUTE)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        rows = (tokens < end)[:, None]
        q = load(q_tile, start, q_n, rows, q_ok, PADDED)
        f = feature_map(q.to(tl.float32), rows & q_ok, feature_eps, FEATURE, G)
        out = tl.dot(f.to(COMPUTE), state, input_precision=PRECISION)
        if CONSTANT:
            out += constant * value_sum[None, :]
        if ROW_SUM:
            total = row_sums(f, rows, key_sum, count, constant, eps, CLAMP, CONSTANT, G)
            out *= spread(scale / total, G, V // G)
        else:
            out *= scale
        if OWN:
            keep = kept(mask, mask_n, tokens, end)
            out += own * load(v_tile, start, v_n, keep, v_ok, PADDED).to(tl.float32)
        if NORM:
            out *= spread(1 / tl.maximum(tl.sqrt(head_sums(out * out, G)), norm_eps), G, V // G)
        store(out_tile, start, out_n, out, rows, v_ok, PADDED)


@triton.jit
def query_gradient_phase(q_tile, g_tile, v_tile, dq_tile, dv_tile, mask, q_n, g_n, v_n, dq_n, dv_n, mask_n,
                         begin, end, own_begin, own_end, q_ok, v_ok, state, key_sum, value_sum, count,
                         constant, scale, eps, feature_eps, own, norm_eps,
                         FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, CONSTANT: tl.constexpr,
                         OWN: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
                         COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of state and sums over the queries begin … end; writes dq, and own·dy into dv, in own_begin … own_end.

    The row sum's gradient needs d out · out, which is phi(q) · (d out · stateᵀ) / row sum: no output is read back. Of a
    softmax over tokens the state is the averaged one, and the gradients are those of the sums that it was made of:
    d Σ exp(k)ᵀ·v = d state / Σ exp(k), and d Σ exp(k) = −state · d state / Σ exp(k).
    """
    BLOCK: tl.constexpr = q_tile.shape[0]
    C: tl.constexpr = state.shape[0]
    V: tl.constexpr = state.shape[1]
    whole = state
    state = state.to(COMPUTE)
    d_state = tl.zeros([C, V], tl.float32)
    d_key_sums = tl.zeros([C, 16 if G < 16 else G], tl.float32)
    d_value_sum = tl.zeros([V], tl.float32)
    d_count = tl.zeros([V], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        rows = (tokens < end)[:, None]
        ours = ((tokens >= own_begin) & (tokens < own_end))[:, None]
        q = load(q_tile, start, q_n, rows, q_ok, PADDED).to(tl.float32)
        g = load(g_tile, start, g_n, rows, v_ok, PADDED)
        f = feature_map(q, rows & q_ok, feature_eps, FEATURE, G)
        if NORM or OWN:
            g = g.to(tl.float32)
            keep = kept(mask, mask_n, tokens, end)
            if NORM:
                y = tl.dot(f.to(COMPUTE), state, input_precision=PRECISION) * scale
                if OWN:
                    y += own * load(v_tile, start, v_n, keep, v_ok, PADDED).to(tl.float32)
                length = tl.sqrt(head_sums(y * y, G))
                inverse = 1 / tl.maximum(length, norm_eps)
                along = tl.where(length > norm_eps, head_sums(y * g, G) * inverse * inverse, 0.0)
                g = (g - y * spread(along, G, V // G)) * spread(inverse, G, V // G)
            if OWN:
                store(dv_tile, start, dv_n, tl.where(keep, own * g, 0.0), ours, v_ok, PADDED)
        df = tl.dot(g.to(COMPUTE), tl.trans(state), input_precision=PRECISION)
        if ROW_SUM:
            total = row_sums(f, rows, key_sum, count, constant, eps, CLAMP, CONSTANT, G)
            inverse = scale / total
            slope = head_sums(f * df, G)
            if CONSTANT:
                slope += constant * head_sums(g.to(tl.float32) * value_sum[None, :], G)
            slope = -slope / total
            if CLAMP:
                slope = tl.where(total > eps, slope, 0.0)
            df = (df + spread(slope, G, C // G) * key_sum[None, :]) * spread(inverse, G, C // G)
            weighted = (f * spread(inverse, G, C // G)).to(COMPUTE)
            d_key_sums = weighted_sum(d_key_sums, weighted, slope, G, PRECISION)
            if CONSTANT:
                d_value_sum += tl.sum(g.to(tl.float32) * spread(inverse, G, V // G), 0)
                d_count += tl.sum(tl.broadcast_to(spread(slope * inverse, G, V // G), [BLOCK, V]), 0)
        else:
            df *= scale
            weighted = f.to(COMPUTE)
            if CONSTANT:
                d_value_sum += tl.sum(g.to(tl.float32), 0) * scale
        d_state = settled(tl.dot(tl.trans(weighted), g.to(COMPUTE), d_state, input_precision=PRECISION))
        store(dq_tile, start, dq_n, feature_gradient(q, f, df, feature_eps, FEATURE, G), ours, q_ok, PADDED)
    if not ROW_SUM:
        d_state *= scale
    d_state = diagonal(d_state, G)
    if over_tokens(FEATURE):
        d_state = averaged(d_state, key_sum)
        d_key_sum = -tl.sum(whole * d_state.to(COMPUTE).to(tl.float32), 1)
    else:
        d_key_sum = own_column(d_key_sums, G)
    return d_state, d_key_sum, d_value_sum, d_count


@triton.jit
def key_gradient_phase(k_tile, v_tile, dk_tile, dv_tile, mask, k_n, v_n, dk_n, dv_n, mask_n, begin, end, k_ok, v_ok,
                       d_state, d_key_sum, d_value_sum, constant, shift, feature_eps,
                       FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CONSTANT: tl.constexpr, OWN: tl.constexpr,
                       PADDED: tl.constexpr, G: tl.constexpr,
                       COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dk and dv for the keys begin … end; zero at masked keys. Adds to what is in dv where OWN."""
    BLOCK: tl.constexpr = k_tile.shape[0]
    d_state = d_state.to(COMPUTE)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        rows = (tokens < end)[:, None]
        keep = kept(mask, mask_n, tokens, end)
        k = load(k_tile, start, k_n, keep, k_ok, PADDED).to(tl.float32)
        v = load(v_tile, start, v_n, keep, v_ok, PADDED)
        f = key_features(k, keep & k_ok, shift, feature_eps, FEATURE, G)
        df = tl.dot(v.to(COMPUTE), tl.trans(d_state), input_precision=PRECISION)
        if ROW_SUM or over_tokens(FEATURE):
            df += d_key_sum[None, :]
        dk = f * df if over_tokens(FEATURE) else feature_gradient(k, f, df, feature_eps, FEATURE, G)
        dv = tl.dot(f.to(COMPUTE), d_state, input_precision=PRECISION)
        if CONSTANT:
            dv += constant * d_value_sum[None, :]
        if mask is not None:
            dk, dv = tl.where(keep, dk, 0.0), tl.where(keep, dv, 0.0)
        if OWN:
            dv += load(dv_tile, start, dv_n, rows, v_ok, PADDED).to(tl.float32)
        store(dk_tile, start, dk_n, dk, rows, k_ok, PADDED)
        store(dv_tile, start, dv_n, dv, rows, v_ok, PADDED)
