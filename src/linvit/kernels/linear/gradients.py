# mypy: disable-error-code="no-untyped-def"
"""Linear attention's gradients in Triton: the two phases of the backward pass, see kernels.py."""

import triton
import triton.language as tl

from linvit.kernels.linear import kernels


@triton.jit
def feature_gradient(x, f, df, eps, FEATURE: tl.constexpr, G: tl.constexpr):
    """dx from phi(x) and its gradient."""
    W: tl.constexpr = x.shape[1] // G
    if FEATURE == "relu":
        dx = tl.where(f > 0, df, 0.0)
    elif FEATURE == "elu_plus_one":
        dx = df * tl.minimum(f, 1.0)
    elif FEATURE == "sigmoid":
        dx = df * f * (1 - f)
    elif FEATURE == "direction":
        length = tl.sqrt(kernels.head_sums(x * x, G))
        along = tl.where(length > eps, kernels.head_sums(f * df, G), 0.0)
        dx = (df - f * kernels.spread(along, G, W)) / kernels.spread(tl.maximum(length, eps), G, W)
    elif FEATURE == "square":
        length = tl.sqrt(kernels.head_sums(x * x, G)) + eps
        u = x / kernels.spread(length, G, W)
        length *= tl.sqrt(kernels.head_sums(u * u * u * u, G)) + eps
        dx = 2 * u * (df - f * kernels.spread(kernels.head_sums(f * df, G), G, W)) / kernels.spread(length, G, W)
    elif FEATURE == "softmax":
        dx = f * (df - kernels.spread(kernels.head_sums(f * df, G), G, W))
    else:
        dx = df
    return dx


@triton.jit
def weighted_sum(total, f, weight, G: tl.constexpr, PRECISION: tl.constexpr):
    """total + Σ f·weight over the tokens, by a matrix product: f is (tokens, C), weight (tokens, G), total (C, 16)."""
    P: tl.constexpr = 16 // G if G < 16 else 1
    if G > 2 and f.dtype == tl.float32 and PRECISION == "tf32":  # Triton 3.6 fails to compile this product
        total += tl.sum(f * kernels.spread(weight, G, f.shape[1] // G), 0)[:, None]
    else:
        weight = tl.broadcast_to(weight, [weight.shape[0], 16]) if G == 1 else kernels.spread(weight, G, P)
        total = tl.dot(tl.trans(f), weight.to(f.dtype), total, input_precision=PRECISION)
    return total


@triton.jit
def own_column(total, G: tl.constexpr):
    """What `weighted_sum` left in each feature's own head: (C, 16 or G) to (C,)."""
    C: tl.constexpr = total.shape[0]
    P: tl.constexpr = total.shape[1]
    if G > 1:
        own = (tl.arange(0, C) // (C // G))[:, None] == (tl.arange(0, P) // (P // G))[None, :]
        total = tl.where(own, total, 0.0)
    return tl.sum(total, 1) * (G / P)


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
        q = kernels.load(q_tile, start, q_n, rows, q_ok, PADDED).to(tl.float32)
        g = kernels.load(g_tile, start, g_n, rows, v_ok, PADDED)
        f = kernels.feature_map(q, rows & q_ok, feature_eps, FEATURE, G)
        if NORM or OWN:
            g = g.to(tl.float32)
            keep = kernels.kept(mask, mask_n, tokens, end)
            if NORM:
                y = tl.dot(f.to(COMPUTE), state, input_precision=PRECISION) * scale
                if OWN:
                    y += own * kernels.load(v_tile, start, v_n, keep, v_ok, PADDED).to(tl.float32)
                length = tl.sqrt(kernels.head_sums(y * y, G))
                inverse = 1 / tl.maximum(length, norm_eps)
                along = tl.where(length > norm_eps, kernels.head_sums(y * g, G) * inverse * inverse, 0.0)
                g = (g - y * kernels.spread(along, G, V // G)) * kernels.spread(inverse, G, V // G)
            if OWN:
                kernels.store(dv_tile, start, dv_n, tl.where(keep, own * g, 0.0), ours, v_ok, PADDED)
        df = tl.dot(g.to(COMPUTE), tl.trans(state), input_precision=PRECISION)
        if ROW_SUM:
            total = kernels.row_sums(f, rows, key_sum, count, constant, eps, CLAMP, CONSTANT, G)
            inverse = scale / total
            slope = kernels.head_sums(f * df, G)
            if CONSTANT:
                slope += constant * kernels.head_sums(g.to(tl.float32) * value_sum[None, :], G)
            slope = -slope / total
            if CLAMP:
                slope = tl.where(total > eps, slope, 0.0)
            df = (df + kernels.spread(slope, G, C // G) * key_sum[None, :]) * kernels.spread(inverse, G, C // G)
            weighted = (f * kernels.spread(inverse, G, C // G)).to(COMPUTE)
            d_key_sums = weighted_sum(d_key_sums, weighted, slope, G, PRECISION)
            if CONSTANT:
                d_value_sum += tl.sum(g.to(tl.float32) * kernels.spread(inverse, G, V // G), 0)
                d_count += tl.sum(tl.broadcast_to(kernels.spread(slope * inverse, G, V // G), [BLOCK, V]), 0)
        else:
            df *= scale
            weighted = f.to(COMPUTE)
            if CONSTANT:
                d_value_sum += tl.sum(g.to(tl.float32), 0) * scale
        d_state = kernels.settled(tl.dot(tl.trans(weighted), g.to(COMPUTE), d_state, input_precision=PRECISION))
        kernels.store(dq_tile, start, dq_n, feature_gradient(q, f, df, feature_eps, FEATURE, G), ours, q_ok, PADDED)
    if not ROW_SUM:
        d_state *= scale
    d_state = kernels.diagonal(d_state, G)
    if kernels.over_tokens(FEATURE):
        d_state = kernels.averaged(d_state, key_sum)
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
        keep = kernels.kept(mask, mask_n, tokens, end)
        k = kernels.load(k_tile, start, k_n, keep, k_ok, PADDED).to(tl.float32)
        v = kernels.load(v_tile, start, v_n, keep, v_ok, PADDED)
        f = kernels.key_features(k, keep & k_ok, shift, feature_eps, FEATURE, G)
        df = tl.dot(v.to(COMPUTE), tl.trans(d_state), input_precision=PRECISION)
        if ROW_SUM or kernels.over_tokens(FEATURE):
            df += d_key_sum[None, :]
        dk = f * df if kernels.over_tokens(FEATURE) else feature_gradient(k, f, df, feature_eps, FEATURE, G)
        dv = tl.dot(f.to(COMPUTE), d_state, input_precision=PRECISION)
        if CONSTANT:
            dv += constant * d_value_sum[None, :]
        if mask is not None:
            dk, dv = tl.where(keep, dk, 0.0), tl.where(keep, dv, 0.0)
        if OWN:
            dv += kernels.load(dv_tile, start, dv_n, rows, v_ok, PADDED).to(tl.float32)
        kernels.store(dk_tile, start, dk_n, dk, rows, k_ok, PADDED)
        kernels.store(dv_tile, start, dv_n, dv, rows, v_ok, PADDED)


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
    k_ok, v_ok = kernels.columns(head, heads, 0, D, G, DW), kernels.columns(head, heads, first, VD, G, VW)
    if shift is not None:
        shift = kernels.load_shift(shift, batch, heads, head, k_ok, D, G, DW)
    v_tile = kernels.tile(v, batch, head, first, v_b, v_h, v_n, v_d, BLOCK, G, VW)
    dv_tile = kernels.tile(dv, batch, head, first, dv_b, dv_h, dv_n, 1, BLOCK, G, VW)
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
        ds, d_key_sum, d_value_sum, d_count = kernels.load_state(d_state, C, V)
    else:
        if state is None:
            k_tile = kernels.tile(k, batch, head, 0, k_b, k_h, k_n, k_d, BLOCK, G, DW)
            s, key_sum, value_sum, count = kernels.keys_phase(
                k_tile, v_tile, mask, k_n, v_n, mask_n, 0, keys, k_ok, v_ok, shift, feature_eps,
                FEATURE, ROW_SUM, CONSTANT, PADDED, G, OPERAND, PRECISION)  # fmt: skip
        else:
            s, key_sum, value_sum, count = kernels.load_state(state + pid.to(tl.int64) * (C * V + C + 2 * V), C, V)
        if kernels.over_tokens(FEATURE):
            s = kernels.averaged(s, key_sum)
        q_tile = kernels.tile(q, batch, head, 0, q_b, q_h, q_n, q_d, BLOCK, G, DW)
        g_tile = kernels.tile(g, batch, head, first, g_b, g_h, g_n, g_d, BLOCK, G, VW)
        dq_tile = kernels.tile(dq + block.to(tl.int64) * dq_s, batch, head, 0, dq_b, dq_h, dq_n, 1, BLOCK, G, DW)
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
            kernels.save_state(d_state, ds, d_key_sum, d_value_sum, d_count)

    if PHASE != "queries":
        if OWN:
            tl.debug_barrier()  # dv holds what other threads of this program wrote
        k_tile = kernels.tile(k, batch, head, 0, k_b, k_h, k_n, k_d, BLOCK, G, DW)
        dk_tile = kernels.tile(dk + block.to(tl.int64) * dk_s, batch, head, 0, dk_b, dk_h, dk_n, 1, BLOCK, G, DW)
        begin, end = chunk * key_chunk, min(keys, (chunk + 1) * key_chunk)
        key_gradient_phase(
            k_tile, v_tile, dk_tile, dv_tile, mask, k_n, v_n, dk_n, dv_n, mask_n, begin, end, k_ok, v_ok,
            ds, d_key_sum, d_value_sum, c, shift, feature_eps,
            FEATURE, ROW_SUM, CONSTANT, OWN, PADDED, G, COMPUTE, PRECISION)  # fmt: skip
