# mypy: disable-error-code="no-untyped-def"
"""Linear attention in Triton: two phases forward and two backward, and the kernels that are made of them.

One program serves G heads side by side, so that small heads still read whole memory lines: their features stand in the
columns of one tile, `state = phi(k)ᵀ · v` is one matrix product, and its blocks off the diagonal are dropped.

    keys phase             state, Σ phi(k), Σ v       reads k, v
    queries phase          out                        reads q
    query gradient phase   dq, and the gradients of state and sums   reads q, d out
    key gradient phase     dk, dv                     reads k, v

Each tensor is read or written once in a direction (k once more before a softmax over tokens, for its largest numbers).
All strides are free; token offsets are 64-bit. Programs count value blocks fastest, then groups of heads, then batches;
the grid's second axis is the chunk of tokens. PHASE "both" runs the two phases of a direction in one program: the first
over all tokens, the second over its chunk. PHASE "keys" or "queries" runs one of them over the chunk; the first of the
two leaves partial states, which `add_partials` adds up in fixed order. Backward computes a state again that is not
saved.
"""

import triton
import triton.language as tl

from linvit.kernels.linear.tiles import (
    averaged,
    columns,
    diagonal,
    feature_gradient,
    feature_map,
    head_sums,
    kept,
    key_features,
    load,
    load_shift,
    load_state,
    over_tokens,
    own_column,
    row_sums,
    save_state,
    settled,
    spread,
    store,
    tile,
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


@triton.jit(do_not_specialize=["heads", "queries", "keys", "query_chunk", "key_chunk"])
def forward_kernel(
    q, k, v, out, mask, constant, shift, state,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, out_b, out_h, out_n, out_d, mask_b, mask_n,
    heads, queries, keys, query_chunk, key_chunk, scale, eps, feature_eps, own, norm_eps,
    PHASE: tl.constexpr, FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, OWN: tl.constexpr,
    NORM: tl.constexpr, D: tl.constexpr, VD: tl.constexpr, G: tl.constexpr, DW: tl.constexpr, VW: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = G * DW
    V: tl.constexpr = G * VW
    CONSTANT: tl.constexpr = constant is not None
    pid, chunk = tl.program_id(0), tl.program_id(1)
    groups = tl.cdiv(heads, G)
    head = pid // BLOCKS % groups * G
    batch = pid // (BLOCKS * groups)
    first = pid % BLOCKS * VW
    k_ok, v_ok = columns(head, heads, 0, D, G, DW), columns(head, heads, first, VD, G, VW)
    if shift is not None:
        shift = load_shift(shift, batch, heads, head, k_ok, D, G, DW)
    v_tile = tile(v, batch, head, first, v_b, v_h, v_n, v_d, BLOCK, G, VW)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    if state is not None:
        place = pid.to(tl.int64)
        if PHASE == "keys":
            place += chunk * tl.num_programs(0)
        state += place * (C * V + C + 2 * V)

    if PHASE == "queries":
        s, key_sum, value_sum, count = load_state(state, C, V)
    else:
        begin, end = 0, keys
        if PHASE == "keys":
            begin, end = chunk * key_chunk, min(keys, (chunk + 1) * key_chunk)
        k_tile = tile(k, batch, head, 0, k_b, k_h, k_n, k_d, BLOCK, G, DW)
        s, key_sum, value_sum, count = keys_phase(
            k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, feature_eps,
            FEATURE, ROW_SUM, CONSTANT, PADDED, G, OPERAND, PRECISION)  # fmt: skip
        if state is not None and (PHASE == "keys" or chunk == 0):
            save_state(state, s, key_sum, value_sum, count)

    if PHASE != "keys":
        c = 0.0
        if CONSTANT:
            c = tl.load(constant).to(tl.float32)
        if over_tokens(FEATURE):
            s = averaged(s, key_sum)
        q_tile = tile(q, batch, head, 0, q_b, q_h, q_n, q_d, BLOCK, G, DW)
        out_tile = tile(out, batch, head, first, out_b, out_h, out_n, out_d, BLOCK, G, VW)
        begin, end = chunk * query_chunk, min(queries, (chunk + 1) * query_chunk)
        queries_phase(
            q_tile, v_tile, out_tile, mask, q_n, v_n, out_n, mask_n, begin, end, k_ok, v_ok,
            s, key_sum, value_sum, count, c, scale, eps, feature_eps, own, norm_eps,
            FEATURE, ROW_SUM, CLAMP, CONSTANT, OWN, NORM, PADDED, G, COMPUTE, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=["heads", "queries", "keys", "query_chunk", "key_chunk"])
def backward_kernel(
    q, k, v, g, dq, dk, dv, mask, constant, shift, state, d_state,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dq_s, dq_b, dq_h, dq_n, dk_s, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_n,
    heads, queries, keys, query_chunk, key_chunk, scale, eps, feature_eps, own, norm_eps,
    PHASE: tl.constexpr, FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, OWN: tl.constexpr,
    NORM: tl.constexpr, D: tl.constexpr, VD: tl.constexpr, G: tl.constexpr, DW: tl.constexpr, VW: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = G * DW
    V: tl.constexpr = G * VW
    CONSTANT: tl.constexpr = constant is not None
    pid, chunk = tl.program_id(0), tl.program_id(1)
    groups = tl.cdiv(heads, G)
    head = pid // BLOCKS % groups * G
    batch = pid // (BLOCKS * groups)
    block = pid % BLOCKS
    first = block * VW
    k_ok, v_ok = columns(head, heads, 0, D, G, DW), columns(head, heads, first, VD, G, VW)
    if shift is not None:
        shift = load_shift(shift, batch, heads, head, k_ok, D, G, DW)
    v_tile = tile(v, batch, head, first, v_b, v_h, v_n, v_d, BLOCK, G, VW)
    dv_tile = tile(dv, batch, head, first, dv_b, dv_h, dv_n, 1, BLOCK, G, VW)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    c = 0.0
    if CONSTANT:
        c = tl.load(constant).to(tl.float32)
    if d_state is not None:
        place = pid.to(tl.int64)
        if PHASE == "queries":
            place += chunk * tl.num_programs(0)
        d_state += place * (C * V + C + 2 * V)

    if PHASE == "keys":
        ds, d_key_sum, d_value_sum, d_count = load_state(d_state, C, V)
    else:
        if state is None:
            k_tile = tile(k, batch, head, 0, k_b, k_h, k_n, k_d, BLOCK, G, DW)
            s, key_sum, value_sum, count = keys_phase(
                k_tile, v_tile, mask, k_n, v_n, mask_n, 0, keys, k_ok, v_ok, shift, feature_eps,
                FEATURE, ROW_SUM, CONSTANT, PADDED, G, OPERAND, PRECISION)  # fmt: skip
        else:
            s, key_sum, value_sum, count = load_state(state + pid.to(tl.int64) * (C * V + C + 2 * V), C, V)
        if over_tokens(FEATURE):
            s = averaged(s, key_sum)
        q_tile = tile(q, batch, head, 0, q_b, q_h, q_n, q_d, BLOCK, G, DW)
        g_tile = tile(g, batch, head, first, g_b, g_h, g_n, g_d, BLOCK, G, VW)
        dq_tile = tile(dq + block.to(tl.int64) * dq_s, batch, head, 0, dq_b, dq_h, dq_n, 1, BLOCK, G, DW)
        own_begin, own_end = chunk * query_chunk, min(queries, (chunk + 1) * query_chunk)
        begin, end = 0, queries
        if PHASE == "queries":
            begin, end = own_begin, own_end
        ds, d_key_sum, d_value_sum, d_count = query_gradient_phase(
            q_tile, g_tile, v_tile, dq_tile, dv_tile, mask, q_n, g_n, v_n, dq_n, dv_n, mask_n,
            begin, end, own_begin, own_end, k_ok, v_ok, s, key_sum, value_sum, count,
            c, scale, eps, feature_eps, own, norm_eps,
            FEATURE, ROW_SUM, CLAMP, CONSTANT, OWN, NORM, PADDED, G, COMPUTE, PRECISION)  # fmt: skip
        if d_state is not None and (PHASE == "queries" or chunk == 0):
            save_state(d_state, ds, d_key_sum, d_value_sum, d_count)

    if PHASE != "queries":
        if OWN:
            tl.debug_barrier()  # dv holds what other threads of this program wrote
        k_tile = tile(k, batch, head, 0, k_b, k_h, k_n, k_d, BLOCK, G, DW)
        dk_tile = tile(dk + block.to(tl.int64) * dk_s, batch, head, 0, dk_b, dk_h, dk_n, 1, BLOCK, G, DW)
        begin, end = chunk * key_chunk, min(keys, (chunk + 1) * key_chunk)
        key_gradient_phase(
            k_tile, v_tile, dk_tile, dv_tile, mask, k_n, v_n, dk_n, dv_n, mask_n, begin, end, k_ok, v_ok,
            ds, d_key_sum, d_value_sum, c, shift, feature_eps,
            FEATURE, ROW_SUM, CONSTANT, OWN, PADDED, G, COMPUTE, PRECISION)  # fmt: skip
