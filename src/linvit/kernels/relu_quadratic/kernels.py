"""Triton code of ReLU-quadratic attention: `out = factor · relu(q · kᵀ + bias) · v`, and its gradients, tile by tile.

It is flash attention with the softmax taken out: no row maximum, no row sum, no exponential, nothing to rescale and
nothing to save for the backward pass. A tile of q · kᵀ exists in registers only.

Zeros need no bookkeeping here: a key or query that is not there, or is masked, is loaded as zero, its products are
zero, and relu(0) and its gradient are zero too. So tails and masks cost a predicate on a load, and the factor and √d
wait until the end. In float16 one operand is scaled by a power of two (exactly) to keep q · kᵀ inside its range. A
bias changes two of these: it is added to scores that are scaled already, and where nothing is, it is loaded as zero.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def rows_of(ptr, batch, head, start, stride_b, stride_h, stride_n, stride_d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to ROWS tokens from `start` on, as (ROWS, WIDTH)."""
    ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + start.to(tl.int64) * stride_n
    return ptr + (tl.arange(0, ROWS)[:, None] * stride_n + tl.arange(0, WIDTH)[None, :] * stride_d)


@triton.jit
def columns_of(ptr, batch, head, stride_b, stride_h, stride_n, stride_d, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the first COLUMNS tokens, transposed to (WIDTH, COLUMNS)."""
    ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return ptr + (tl.arange(0, WIDTH)[:, None] * stride_d + tl.arange(0, COLUMNS)[None, :] * stride_n)


@triton.jit
def kept(mask, start, end, mask_n, COUNT: tl.constexpr):
    """Which of COUNT keys from `start` on are there and not masked."""
    tokens = start + tl.arange(0, COUNT)
    keep = tokens < end
    if mask is not None:
        keep = keep & tl.load(mask + tokens.to(tl.int64) * mask_n, mask=keep, other=0).to(tl.int1)
    return keep


@triton.jit
def place(heads, BLOCKS):
    """Block, batch and head of this program; blocks of one head are neighbours and share its tokens in the cache."""
    program = tl.program_id(0)
    return program % BLOCKS, program // BLOCKS // heads, program // BLOCKS % heads


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load(pointers, ok, PLAIN: tl.constexpr, KIND: tl.constexpr):
    x = tl.load(pointers) if PLAIN else tl.load(pointers, mask=ok, other=0.0)
    return x.to(KIND)


@triton.jit
def corner_of(bias, batch, head, start, bias_b, bias_h, bias_n, period):
    """Where a bias's tiles begin; images of the bias come again after `period`. One pointer goes along and not one for
    each number: registers are short."""
    batch = batch % period
    return bias + (batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h + start.to(tl.int64) * bias_n)


@triton.jit
def biased(scores, bias_in, ok, sharp, down, right):
    """Scaled scores with their bias, its rows `down` apart and columns `right`; without one, scores as they are."""
    if bias_in is not None:
        row, column = tl.arange(0, scores.shape[0])[:, None] * down, tl.arange(0, scores.shape[1])[None, :] * right
        scores = scores * sharp + tl.load(bias_in + (row + column), mask=ok, other=0.0).to(tl.float32)
    return scores


@triton.jit
def key_tile_step(k_in, v_in, bias_in, q_tile, g_tile, total, ok_k, ok_v, ok_bias, sharp, down, right,
                  PLAIN_K: tl.constexpr, PLAIN_V: tl.constexpr, KIND: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """What one tile of keys adds to the output; to dq where there is a `g_tile`, for which k stands in rows."""
    k_tile = load(k_in, ok_k, PLAIN_K, KIND)
    if g_tile is None:
        v_tile = load(v_in, ok_v, PLAIN_V, KIND)
        scores = biased(tl.dot(q_tile, k_tile, input_precision=PRECISION), bias_in, ok_bias, sharp, down, right)
        return tl.dot(relu(scores).to(KIND), v_tile, total, input_precision=PRECISION)
    else:
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        scores = biased(scores, bias_in, ok_bias, sharp, down, right)
        v_tile = load(v_in, ok_v, PLAIN_V, KIND)
        d_weight = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        d_scores = tl.where(scores > 0, d_weight, 0.0).to(KIND)
        return tl.dot(d_scores, k_tile, total, input_precision=PRECISION)


@triton.jit
def over_keys(k_in, v_in, bias_in, q_tile, g_tile, total, mask, rows, channel, value, keys, k_n, v_n, mask_n,
              sharp, bias_m, bias_n, WHOLE_K: tl.constexpr, WHOLE_V: tl.constexpr, N: tl.constexpr,
              KIND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The sum of `key_tile_step` over all keys. Without a mask the last tile alone is checked for keys that are there;
    `channel` and `value` are true for channels that are, in the tiles' shape."""
    if mask is None:
        whole = keys // N * N
        for _ in tl.range(0, whole, N):
            total = key_tile_step(
                k_in, v_in, bias_in, q_tile, g_tile, total, channel, value, rows, sharp, bias_m, bias_n,
                WHOLE_K, WHOLE_V, KIND, PRECISION,
            )  # fmt: skip
            k_in += N * k_n
            v_in += N * v_n
            if bias_in is not None:
                bias_in += N * bias_n
        if whole < keys:
            keep = whole + tl.arange(0, N) < keys
            ok_k = keep[None, :] & channel if g_tile is None else keep[:, None] & channel
            total = key_tile_step(
                k_in, v_in, bias_in, q_tile, g_tile, total, ok_k, keep[:, None] & value, rows & keep[None, :], sharp,
                bias_m, bias_n, False, False, KIND, PRECISION,
            )  # fmt: skip
    else:
        for start in tl.range(0, keys, N):
            keep = kept(mask, start, keys, mask_n, N)
            ok_k = keep[None, :] & channel if g_tile is None else keep[:, None] & channel
            total = key_tile_step(
                k_in, v_in, bias_in, q_tile, g_tile, total, ok_k, keep[:, None] & value, rows & keep[None, :], sharp,
                bias_m, bias_n, False, False, KIND, PRECISION,
            )  # fmt: skip
            k_in += N * k_n
            v_in += N * v_n
            if bias_in is not None:
                bias_in += N * bias_n
    return total


@triton.jit
def forward_kernel(
    q, k, v, out, mask, inverse, bias, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n,
    mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries, keys, prescale, sharp, factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, VW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, PRESCALE: tl.constexpr,
):  # fmt: skip
    """One block of M queries of one head, over all keys."""
    block, batch, head = place(heads, tl.cdiv(queries, M))
    channel, value = tl.arange(0, DW) < D, (tl.arange(0, VW) < VD)[None, :]
    rows = (block * M + tl.arange(0, M) < queries)[:, None]
    queries_in = rows_of(q, batch, head, block * M, q_b, q_h, q_n, q_d, M, DW)
    q_tile = load(queries_in, rows & channel[None, :], False, KIND)
    if PRESCALE:
        q_tile = (q_tile * prescale).to(KIND)
    k_in = columns_of(k, batch, head, k_b, k_h, k_n, k_d, N, DW)
    v_in = rows_of(v, batch, head, tl.zeros([], tl.int32), v_b, v_h, v_n, v_d, N, VW)
    bias_in = bias
    if bias is not None:
        bias_in = corner_of(bias, batch, head, block * M, bias_b, bias_h, bias_m, period)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    total = over_keys(
        k_in, v_in, bias_in, q_tile, None, tl.zeros([M, VW], tl.float32), mask, rows, channel[:, None], value, keys,
        k_n, v_n, mask_n, sharp, bias_m, bias_n, D == DW, VD == VW, N, KIND, PRECISION,
    )  # fmt: skip
    if inverse is not None:
        factor *= tl.load(inverse + batch)
    out_at = rows_of(out, batch, head, block * M, o_b, o_h, o_n, 1, M, VW)
    tl.store(out_at, (total * factor).to(out.dtype.element_ty), mask=rows & value)


@triton.jit
def key_step(q_in, g_in, bias_in, k_tile, v_tile, dk, dv, ok_q, ok_g, ok_bias, sharp, down, right,
             PLAIN_Q: tl.constexpr, PLAIN_G: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
             k_scaled):  # fmt: skip
    """What one tile of queries adds to dk and dv; the scores stand transposed, (keys, queries)."""
    q_tile = load(q_in, ok_q, PLAIN_Q, KIND)
    scores = tl.dot(k_scaled, tl.trans(q_tile), input_precision=PRECISION)
    scores = biased(scores, bias_in, ok_bias, sharp, down, right)
    g_tile = load(g_in, ok_g, PLAIN_G, KIND)
    dv = tl.dot(relu(scores).to(KIND), g_tile, dv, input_precision=PRECISION)
    d_weight = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
    d_scores = tl.where(scores > 0, d_weight, 0.0).to(KIND)
    return tl.dot(d_scores, q_tile, dk, input_precision=PRECISION), dv


@triton.jit
def key_gradient_kernel(
    q, k, v, g, dk, dv, mask, inverse, bias, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n,
    g_d, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries,
    keys, prescale, sharp, factor, value_factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, VW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, PRESCALE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of N keys of one head, over all queries."""
    block, batch, head = place(heads, tl.cdiv(keys, N))
    channel, value = (tl.arange(0, DW) < D)[None, :], (tl.arange(0, VW) < VD)[None, :]
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    keep = kept(mask, block * N, keys, mask_n, N)[:, None]
    k_tile = load(rows_of(k, batch, head, block * N, k_b, k_h, k_n, k_d, N, DW), keep & channel, False, KIND)
    v_tile = load(rows_of(v, batch, head, block * N, v_b, v_h, v_n, v_d, N, VW), keep & value, False, KIND)
    k_scaled = (k_tile * prescale).to(KIND) if PRESCALE else k_tile
    q_in = rows_of(q, batch, head, tl.zeros([], tl.int32), q_b, q_h, q_n, q_d, M, DW)
    g_in = rows_of(g, batch, head, tl.zeros([], tl.int32), g_b, g_h, g_n, g_d, M, VW)
    bias_in = bias
    if bias is not None:
        bias_in = corner_of(bias, batch, head, block * N, bias_b, bias_h, bias_n, period)
    dk_total = tl.zeros([N, DW], tl.float32)
    dv_total = tl.zeros([N, VW], tl.float32)
    whole = queries // M * M
    for _ in tl.range(0, whole, M):
        dk_total, dv_total = key_step(
            q_in, g_in, bias_in, k_tile, v_tile, dk_total, dv_total, channel, value, keep, sharp, bias_n, bias_m,
            D == DW, VD == VW, KIND, PRECISION, k_scaled,
        )  # fmt: skip
        q_in += M * q_n
        g_in += M * g_n
        if bias is not None:
            bias_in += M * bias_m
    if whole < queries:
        there = whole + tl.arange(0, M) < queries
        rows = there[:, None]
        dk_total, dv_total = key_step(
            q_in, g_in, bias_in, k_tile, v_tile, dk_total, dv_total, rows & channel, rows & value,
            keep & there[None, :], sharp, bias_n, bias_m, False, False, KIND, PRECISION, k_scaled,
        )  # fmt: skip
    if inverse is not None:
        factor *= tl.load(inverse + batch)
        value_factor *= tl.load(inverse + batch)
    own = (block * N + tl.arange(0, N) < keys)[:, None]
    dk_at = rows_of(dk, batch, head, block * N, dk_b, dk_h, dk_n, 1, N, DW)
    dv_at = rows_of(dv, batch, head, block * N, dv_b, dv_h, dv_n, 1, N, VW)
    tl.store(dk_at, (dk_total * factor).to(dk.dtype.element_ty), mask=own & channel)
    tl.store(dv_at, (dv_total * value_factor).to(dv.dtype.element_ty), mask=own & value)


@triton.jit
def query_gradient_kernel(
    q, k, v, g, dq, mask, inverse, bias, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dq_b, dq_h, dq_n, mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries, keys, sharp, factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, VW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one block of M queries of one head, over all keys."""
    block, batch, head = place(heads, tl.cdiv(queries, M))
    channel, value = (tl.arange(0, DW) < D)[None, :], (tl.arange(0, VW) < VD)[None, :]
    rows = (block * M + tl.arange(0, M) < queries)[:, None]
    q_tile = load(rows_of(q, batch, head, block * M, q_b, q_h, q_n, q_d, M, DW), rows & channel, False, KIND)
    g_tile = load(rows_of(g, batch, head, block * M, g_b, g_h, g_n, g_d, M, VW), rows & value, False, KIND)
    k_in = rows_of(k, batch, head, tl.zeros([], tl.int32), k_b, k_h, k_n, k_d, N, DW)
    v_in = rows_of(v, batch, head, tl.zeros([], tl.int32), v_b, v_h, v_n, v_d, N, VW)
    bias_in = bias
    if bias is not None:
        bias_in = corner_of(bias, batch, head, block * M, bias_b, bias_h, bias_m, period)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    total = over_keys(
        k_in, v_in, bias_in, q_tile, g_tile, tl.zeros([M, DW], tl.float32), mask, rows, channel, value, keys,
        k_n, v_n, mask_n, sharp, bias_m, bias_n, D == DW, VD == VW, N, KIND, PRECISION,
    )  # fmt: skip
    if inverse is not None:
        factor *= tl.load(inverse + batch)
    dq_at = rows_of(dq, batch, head, block * M, dq_b, dq_h, dq_n, 1, M, DW)
    tl.store(dq_at, (total * factor).to(dq.dtype.element_ty), mask=rows & channel)


@triton.jit
def bias_gradient_kernel(
    q, k, v, g, bias, mask, inverse, out, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n,
    g_d, mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries, keys, repeats, share, sharp, factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, VW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The bias's gradient for M queries and N keys of one head, summed over a share of the images that have it."""
    across, parts = tl.cdiv(keys, N), tl.cdiv(repeats, share)
    tile, part, head = place(heads, across * tl.cdiv(queries, M))
    first, left = tile // across * M, tile % across * N
    channel, value = (tl.arange(0, DW) < D)[None, :], (tl.arange(0, VW) < VD)[None, :]
    there = first + tl.arange(0, M) < queries
    rows = there[:, None]
    total = tl.zeros([M, N], tl.float32)
    begin = part % parts * share
    for number in tl.range(0, tl.minimum(repeats - begin, share)):
        image = part // parts + period * (begin + number)
        scale = factor
        masked = mask
        if mask is not None:
            masked = mask + image.to(tl.int64) * mask_b
            scale *= tl.load(inverse + image)
        keep = kept(masked, left, keys, mask_n, N)
        columns = keep[:, None]
        q_tile = load(rows_of(q, image, head, first, q_b, q_h, q_n, q_d, M, DW), rows & channel, False, KIND)
        k_tile = load(rows_of(k, image, head, left, k_b, k_h, k_n, k_d, N, DW), columns & channel, False, KIND)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        bias_in = corner_of(bias, image, head, first, bias_b, bias_h, bias_m, period) + left.to(tl.int64) * bias_n
        scores = biased(scores, bias_in, rows & keep[None, :], sharp, bias_m, bias_n)
        g_tile = load(rows_of(g, image, head, first, g_b, g_h, g_n, g_d, M, VW), rows & value, False, KIND)
        v_tile = load(rows_of(v, image, head, left, v_b, v_h, v_n, v_d, N, VW), columns & value, False, KIND)
        d_weight = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        total += tl.where(scores > 0, d_weight * scale, 0.0)
    column = left + tl.arange(0, N)
    at = (part.to(tl.int64) * heads + head) * queries * keys + (first + tl.arange(0, M)).to(tl.int64)[:, None] * keys
    tl.store(out + at + column[None, :], total, mask=rows & (column < keys)[None, :])
