# mypy: disable-error-code="no-untyped-def, assignment"
"""Linear attention's gradients in Triton: the two phases of the backward pass, see kernels.py."""

import triton
import triton.language as tl

from linvit.kernels import tiles
from linvit.kernels.linear import features, kernels, states


@triton.jit
def weighted_sums(total, f, weight, G: tl.constexpr, PRECISION: tl.constexpr):
    """total + Σ f·weight over the tokens, by a matrix product: f is (tokens, C), weight (tokens, G), total (C, 16)."""
    out = ()
    for i in tl.static_range(len(f)):
        out += (_weighted_sum(total[i], f[i], weight, G, PRECISION),)
    return out


@triton.jit
def _weighted_sum(total, f, weight, G: tl.constexpr, PRECISION: tl.constexpr):
    P: tl.constexpr = 16 // G if G < 16 else 1
    if f.dtype == tl.float32 and (G > 2 or PRECISION == "tf32x3"):  # Triton 3.6 fails with these products
        total += tl.sum(f * tiles.spread(weight, G, f.shape[1] // G), 0)[:, None]
    else:
        weight = tl.broadcast_to(weight, [weight.shape[0], 16]) if G == 1 else tiles.spread(weight, G, P)
        total = tl.dot(tl.trans(f), weight.to(f.dtype), total, input_precision=PRECISION)
    return total


@triton.jit
def own_columns(total, G: tl.constexpr):
    """What `weighted_sums` left in each feature's own head: (C, 16 or G) to (C,)."""
    out = ()
    for i in tl.static_range(len(total)):
        out += (_own_column(total[i], G),)
    return out


@triton.jit
def _own_column(total, G: tl.constexpr):
    C: tl.constexpr = total.shape[0]
    P: tl.constexpr = total.shape[1]
    if G > 1:
        own = (tl.arange(0, C) // (C // G))[:, None] == (tl.arange(0, P) // (P // G))[None, :]
        total = tl.where(own, total, 0.0)
    return tl.sum(total, 1) * (G / P)


@triton.jit
def average_gradient(average, d_state, like, COMPUTE: tl.constexpr):
    """d Σ exp(k) = −Σ average · d state over the values."""
    J: tl.constexpr = len(d_state) // len(like)
    out = ()
    for i in tl.static_range(len(like)):
        total = tl.zeros([d_state[i * J].shape[0]], tl.float32)
        for j in tl.static_range(J):
            total -= tl.sum(average[i * J + j] * d_state[i * J + j].to(COMPUTE).to(tl.float32), 1)
        out += (total,)
    return out


@triton.jit
def dots(x, y):
    """Σ x·y over all pieces of two tuples of vectors."""
    total = tl.sum(x[0] * y[0])
    for i in tl.static_range(1, len(x)):
        total += tl.sum(x[i] * y[i])
    return total


@triton.jit
def query_gradient_phase(q_tile, g_tile, v_tile, dq_tile, dv_tile, mask, q_n, g_n, v_n, dq_n, dv_n, mask_n,
                         begin, end, own_begin, own_end, q_ok, v_ok, state, key_sum, value_sum, count,
                         turn_cos, turn_sin, constant, scale, eps, feature_eps, own, norm_eps,
                         FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, CONSTANT: tl.constexpr,
                         OWN: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, PADDED: tl.constexpr,
                         G: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of state and sums over the queries begin … end; writes dq, and own·dy into dv, in own_begin … own_end.

    The row sum's gradient needs d out · out, which is phi(q) · (d out · stateᵀ) / row sum: no output is read back. Of a
    softmax over tokens the state is the averaged one, and the gradients are those of the sums that it was made of:
    d Σ exp(k)ᵀ·v = d state / Σ exp(k), and d Σ exp(k) = −state · d state / Σ exp(k).
    """
    BLOCK: tl.constexpr = q_tile[0].shape[0]
    V: tl.constexpr = v_tile[0].shape[1]
    whole = state
    state = tiles.as_type(state, COMPUTE)
    d_state = tiles.zeros(q_tile, v_tile, 0)
    d_key_sums = tiles.zeros(q_tile, None, 16 if G < 16 else G)
    d_value_sum = tiles.no_sums(v_tile)
    d_count = tl.zeros([V], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        rows = (tokens < end)[:, None]
        ours = ((tokens >= own_begin) & (tokens < own_end))[:, None]
        q = tiles.as_type(tiles.load(q_tile, start, q_n, rows, q_ok, PADDED), tl.float32)
        g = tiles.load(g_tile, start, g_n, rows, v_ok, PADDED)
        f = features.feature_map(q, None, q_ok, feature_eps, FEATURE, PADDED, G)
        met = f
        if TURN != "":
            cos = features.angles(turn_cos, start, tokens, end, 1)
            sin = features.angles(turn_sin, start, tokens, end, 0)
            met = features.turned(f, cos, sin, TURN, G)
        if NORM or OWN:
            g = tiles.as_type(g, tl.float32)
            if OWN:
                keep = tiles.kept(mask, mask_n, tokens, end)
            if NORM:
                y = tiles.times(tiles.as_type(met, COMPUTE), state, PRECISION)
                if CONSTANT:
                    y = tiles.plus(y, tiles.multiples(value_sum, constant))
                if ROW_SUM:
                    total = features.row_sums(f, rows, key_sum, count, constant, eps, CLAMP, CONSTANT, G)
                    y = tiles.scaled(y, scale / total, G)
                else:
                    y = tiles.each_times(y, scale)
                if OWN:
                    v = tiles.as_type(tiles.load(v_tile, start, v_n, keep, v_ok, PADDED), tl.float32)
                    y = tiles.plus(y, tiles.each_times(v, own))
                length = tl.sqrt(tiles.head_sums(y, y, G))
                inverse = 1 / tl.maximum(length, norm_eps)
                along = tl.where(length > norm_eps, tiles.head_sums(y, g, G) * inverse * inverse, 0.0)
                g = tiles.scaled(tiles.plus(g, tiles.scaled(y, -along, G)), inverse, G)
            if OWN:
                tiles.store(dv_tile, start, dv_n, tiles.where(keep, tiles.each_times(g, own)), ours, v_ok, PADDED)
        of_state = tiles.as_type(g, COMPUTE)
        df = tiles.times_transposed(of_state, state, PRECISION)
        if ROW_SUM:
            total = features.row_sums(f, rows, key_sum, count, constant, eps, CLAMP, CONSTANT, G)
            inverse = scale / total
            slope = tiles.head_sums(met, df, G)
            if CONSTANT:
                g = tiles.as_type(g, tl.float32)
                slope += constant * tiles.head_sums(g, tiles.multiples(value_sum, 1.0), G)
            slope = -slope / total
            if CLAMP:
                slope = tl.where(total > eps, slope, 0.0)
            if TURN != "":
                df = features.turned(df, cos, features.back(sin), TURN, G)
            df = tiles.plus(df, tiles.outer(slope, key_sum, G))
            df = tiles.scaled(df, inverse, G)
            weighted = tiles.as_type(tiles.scaled(f, inverse, G), COMPUTE)
            d_key_sums = weighted_sums(d_key_sums, weighted, slope, G, PRECISION)
            if TURN != "":
                weighted = tiles.as_type(tiles.scaled(met, inverse, G), COMPUTE)
            if CONSTANT:
                d_value_sum = tiles.add_sums(d_value_sum, tiles.scaled(g, inverse, G))
                d_count += tl.sum(tl.broadcast_to(tiles.spread(slope * inverse, G, V // G), [BLOCK, V]), 0)
        else:
            if TURN != "":
                df = features.turned(df, cos, features.back(sin), TURN, G)
            df = tiles.each_times(df, scale)
            weighted = tiles.as_type(met, COMPUTE)
            if CONSTANT:
                d_value_sum = tiles.add_sums(d_value_sum, tiles.each_times(tiles.as_type(g, tl.float32), scale))
        d_state = tiles.add_products(d_state, weighted, of_state, PRECISION)
        d_state, d_key_sums = tiles.settled(d_state), tiles.settled(d_key_sums)
        dq = features.feature_gradient(q, f, df, feature_eps, FEATURE, G)
        tiles.store(dq_tile, start, dq_n, dq, ours, q_ok, PADDED)
    if not ROW_SUM:
        d_state = tiles.each_times(d_state, scale)
    d_state = states.diagonal(d_state, G)
    if features.over_tokens(FEATURE):
        d_state = states.averaged(d_state, key_sum)
        d_key_sum = average_gradient(whole, d_state, key_sum, COMPUTE)
    else:
        d_key_sum = own_columns(d_key_sums, G)
    return d_state, d_key_sum, d_value_sum, d_count


@triton.jit
def key_gradient_phase(k_tile, v_tile, dk_tile, dv_tile, mask, k_n, v_n, dk_n, dv_n, mask_n, begin, end, k_ok, v_ok,
                       d_state, d_key_sum, d_value_sum, turn_cos, turn_sin, constant, shift, feature_eps,
                       FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CONSTANT: tl.constexpr, OWN: tl.constexpr,
                       TURN: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
                       COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dk and dv for the keys begin … end; zero at masked keys. Adds to what is in dv where OWN."""
    BLOCK: tl.constexpr = k_tile[0].shape[0]
    d_state = tiles.as_type(d_state, COMPUTE)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        rows = (tokens < end)[:, None]
        keep = tiles.kept(mask, mask_n, tokens, end)
        k = tiles.as_type(tiles.load(k_tile, start, k_n, keep, k_ok, PADDED), tl.float32)
        v = tiles.load(v_tile, start, v_n, keep, v_ok, PADDED)
        f = features.key_features(k, keep, k_ok, shift, feature_eps, FEATURE, PADDED, G)
        df = tiles.times_transposed(tiles.as_type(v, COMPUTE), d_state, PRECISION)
        met = f
        if TURN != "":
            cos = features.angles(turn_cos, start, tokens, end, 1)
            sin = features.angles(turn_sin, start, tokens, end, 0)
            met = features.turned(f, cos, sin, TURN, G)
            df = features.turned(df, cos, features.back(sin), TURN, G)
        if ROW_SUM or features.over_tokens(FEATURE):
            df = tiles.plus(df, tiles.multiples(d_key_sum, 1.0))
        if features.over_tokens(FEATURE):
            dk = features.products(f, df)
        else:
            dk = features.feature_gradient(k, f, df, feature_eps, FEATURE, G)
        dv = tiles.times(tiles.as_type(met, COMPUTE), d_state, PRECISION)
        if CONSTANT:
            dv = tiles.plus(dv, tiles.multiples(d_value_sum, constant))
        if mask is not None:
            dk, dv = tiles.where(keep, dk), tiles.where(keep, dv)
        if OWN:
            before = tiles.load(dv_tile, start, dv_n, rows, v_ok, PADDED)
            dv = tiles.plus(dv, tiles.as_type(before, tl.float32))
        tiles.store(dk_tile, start, dk_n, dk, rows, k_ok, PADDED)
        tiles.store(dv_tile, start, dv_n, dv, rows, v_ok, PADDED)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "query_chunk", "key_chunk", "prefix"])
def backward_kernel(
    q, k, v, g, dq, dk, dv, mask, cos, sin, constant, d_constant, shift, state, d_state,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, dq_s, dk_s, mask_b, mask_n,
    cos_b, cos_h, cos_n, cos_d, weight_h, weight_n, heads, queries, keys, prefix, query_chunk, key_chunk,
    scale, eps, feature_eps, own, norm_eps,
    PHASE: tl.constexpr, FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, SQUARED: tl.constexpr,
    OWN: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, TAPS: tl.constexpr, D: tl.constexpr, VD: tl.constexpr,
    G: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, STATE_BLOCK: tl.constexpr, UNIT: tl.constexpr, PADDED: tl.constexpr, OPERAND: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`d_constant` gets each program's share of the constant's gradient, where it is wanted."""
    C: tl.constexpr = G * DW + DR
    V: tl.constexpr = G * VW + VR
    NUMBERS: tl.constexpr = C * V + C + V + G * VW
    CONSTANT: tl.constexpr = constant is not None
    q_b, q_h, q_n = tiles.strides(q_b, q_h, q_n, UNIT)
    k_b, k_h, k_n = tiles.strides(k_b, k_h, k_n, UNIT)
    v_b, v_h, v_n = tiles.strides(v_b, v_h, v_n, UNIT)
    g_b, g_h, g_n = tiles.strides(g_b, g_h, g_n, UNIT)
    dq_b, dq_h, dq_n = tiles.strides(dq_b, dq_h, dq_n, UNIT)
    dk_b, dk_h, dk_n = tiles.strides(dk_b, dk_h, dk_n, UNIT)
    dv_b, dv_h, dv_n = tiles.strides(dv_b, dv_h, dv_n, UNIT)
    pid, chunk = tl.program_id(0), tl.program_id(1)
    groups = tl.cdiv(heads, G)
    head = pid // BLOCKS % groups * G
    batch = pid // (BLOCKS * groups)
    block = pid % BLOCKS
    first = block * VW
    k_ok, v_ok = tiles.columns(head, heads, 0, D, G, DW, DR), tiles.columns(head, heads, first, VD, G, VW, VR)
    k_tile = tiles.tiles(k, batch, head, 0, k_b, k_h, k_n, k_d, BLOCK, G, DW, DR)
    v_tile = tiles.tiles(v, batch, head, first, v_b, v_h, v_n, v_d, BLOCK, G, VW, VR)
    dv_tile = tiles.tiles(dv, batch, head, first, dv_b, dv_h, dv_n, 1, BLOCK, G, VW, VR)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    turn_cos = features.turns(cos, batch, head, heads, cos_b, cos_h, cos_n, cos_d, prefix, TURN, D, BLOCK, G, DW, DR)
    turn_sin = features.turns(sin, batch, head, heads, cos_b, cos_h, cos_n, cos_d, prefix, TURN, D, BLOCK, G, DW, DR)
    c = 0.0
    slope = 1.0
    if CONSTANT:
        c = tl.load(constant).to(tl.float32)
        if SQUARED:
            slope = 2 * c
            c = c * c
    if shift is not None:
        shift = tiles.load_row(shift, batch, heads, head, k_ok, D, G, DW)
    if d_state is not None:
        place = pid.to(tl.int64)
        if PHASE == "queries":
            place += chunk * tl.num_programs(0)
        d_state += place * NUMBERS

    if state is not None:
        s, key_sum, value_sum, count = states.load_state(state + pid.to(tl.int64) * NUMBERS, G * DW, DR, G * VW, VR)
    elif PHASE != "keys":
        state_k = tiles.tiles(k, batch, head, 0, k_b, k_h, k_n, k_d, STATE_BLOCK, G, DW, DR)
        state_v = tiles.tiles(v, batch, head, first, v_b, v_h, v_n, v_d, STATE_BLOCK, G, VW, VR)
        s, key_sum, value_sum, count, shift = kernels.keys_phase(
            state_k, state_v, mask, k_n, v_n, mask_n, 0, keys, k_ok, v_ok, shift, turn_cos, turn_sin, feature_eps,
            FEATURE, ROW_SUM, CONSTANT, TURN, PADDED, G, OPERAND, PRECISION)  # fmt: skip
    if PHASE == "keys":
        ds, d_key_sum, d_value_sum, d_count = states.load_state(d_state, G * DW, DR, G * VW, VR)
    else:
        if features.over_tokens(FEATURE):
            s = states.averaged(s, key_sum)
        q_tile = tiles.tiles(q, batch, head, 0, q_b, q_h, q_n, q_d, BLOCK, G, DW, DR)
        g_tile = tiles.tiles(g, batch, head, first, g_b, g_h, g_n, g_d, BLOCK, G, VW, VR)
        dq_start = dq + block.to(tl.int64) * dq_s
        dq_tile = tiles.tiles(dq_start, batch, head, 0, dq_b, dq_h, dq_n, 1, BLOCK, G, DW, DR)
        own_begin, own_end = chunk * query_chunk, min(queries, (chunk + 1) * query_chunk)
        begin, end = 0, queries
        if PHASE == "queries":
            begin, end = own_begin, own_end
        ds, d_key_sum, d_value_sum, d_count = query_gradient_phase(
            q_tile, g_tile, v_tile, dq_tile, dv_tile, mask, q_n, g_n, v_n, dq_n, dv_n, mask_n,
            begin, end, own_begin, own_end, k_ok, v_ok, s, key_sum, value_sum, count, turn_cos, turn_sin,
            c, scale, eps, feature_eps, own, norm_eps,
            FEATURE, ROW_SUM, CLAMP, CONSTANT, OWN, NORM, TURN, PADDED, G, COMPUTE, PRECISION)  # fmt: skip
        if d_state is not None and (PHASE == "queries" or chunk == 0):
            states.save_state(d_state, ds, d_key_sum, d_value_sum, d_count)

    if PHASE != "queries":
        if d_constant is not None and chunk == 0:
            share = dots(value_sum, d_value_sum)
            if ROW_SUM:
                share += tl.sum(count * d_count) / VW
            tl.store(d_constant + pid, share * slope)
        if OWN:
            tl.debug_barrier()  # dv holds what other threads of this program wrote
        dk_start = dk + block.to(tl.int64) * dk_s
        dk_tile = tiles.tiles(dk_start, batch, head, 0, dk_b, dk_h, dk_n, 1, BLOCK, G, DW, DR)
        begin, end = chunk * key_chunk, min(keys, (chunk + 1) * key_chunk)
        key_gradient_phase(
            k_tile, v_tile, dk_tile, dv_tile, mask, k_n, v_n, dk_n, dv_n, mask_n, begin, end, k_ok, v_ok,
            ds, d_key_sum, d_value_sum, turn_cos, turn_sin, c, shift, feature_eps,
            FEATURE, ROW_SUM, CONSTANT, OWN, TURN, PADDED, G, COMPUTE, PRECISION)  # fmt: skip
