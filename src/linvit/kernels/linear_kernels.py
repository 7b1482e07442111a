# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels of linear attention, made of the phases in `linear_phases`.

Programs count value blocks fastest, then groups of heads, then batches; the grid's second axis is the chunk of tokens.
PHASE "both" runs the two phases of a direction in one program: the first over all tokens, the second over its chunk.
PHASE "keys" or "queries" runs one of them over the chunk; the first of the two leaves partial states, which
`add_partials` adds up. Backward without a saved state computes it again.
"""

import triton
import triton.language as tl

from linvit.kernels.linear_phases import key_gradient_phase, keys_phase, queries_phase, query_gradient_phase
from linvit.kernels.linear_tiles import averaged, columns, load_shift, load_state, over_tokens, save_state, tile


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
        if state is not None:
            if PHASE == "keys":  # noqa: SIM114  PHASE is known when compiling, chunk is not
                save_state(state, s, key_sum, value_sum, count)
            elif chunk == 0:
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
        if d_state is not None:
            if PHASE == "queries":  # noqa: SIM114  PHASE is known when compiling, chunk is not
                save_state(d_state, ds, d_key_sum, d_value_sum, d_count)
            elif chunk == 0:
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


@triton.jit(do_not_specialize=["parts", "size"])
def add_partials(partial, total, parts, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """total = the sum of `parts` buffers of `size` numbers, always in the same order, so that it never varies."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    inside = at < size
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, parts, ROWS):
        here = (first + row)[:, None]
        sums += tl.load(partial + here.to(tl.int64) * size + at[None, :], mask=(here < parts) & inside, other=0.0)
    tl.store(total + at, tl.sum(sums, 0), mask=inside)
