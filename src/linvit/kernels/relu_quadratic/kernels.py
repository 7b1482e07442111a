"""Triton code of ReLU-quadratic attention: `out = factor · relu(q · kᵀ + bias) · v`, and its gradients, tile by tile.

It is flash attention with the softmax taken out: no row maximum, no row sum, no exponential, nothing to rescale and
nothing to save for the backward pass. A tile of q · kᵀ exists in registers only.

Zeros need no bookkeeping here: a key or query that is not there, or is masked, is loaded as zero, its products are
zero, and relu(0) and its gradient are zero too. So tails and masks cost a predicate on a load, and the factor and √d
wait until the end. In float16 one operand is scaled by a power of two (exactly) to keep q · kᵀ inside its range. A
bias changes two of these: it is added to scores that are scaled already, and where nothing is, it is loaded as zero.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from linvit.kernels.quadratic import (
    add_products,
    kept,
    load,
    onward,
    place,
    products,
    rows_of,
    scaled,
    store,
    zeros,
)


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


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
def key_tile_step(k_in, v_in, bias_in, q_tile, g_tile, total, there, ok_bias, sharp, down, right,
                  D: tl.constexpr, VD: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What one tile of keys adds to the output; to dq where there is a `g_tile`."""
    k_tile = load(k_in, there, D, KIND)
    if g_tile is None:
        v_tile = load(v_in, there, VD, KIND)
        scores = biased(products(q_tile, k_tile, PRECISION), bias_in, ok_bias, sharp, down, right)
        return add_products(total, relu(scores).to(KIND), v_tile, PRECISION)
    else:
        scores = biased(products(q_tile, k_tile, PRECISION), bias_in, ok_bias, sharp, down, right)
        v_tile = load(v_in, there, VD, KIND)
        d_weight = products(g_tile, v_tile, PRECISION)
        d_scores = tl.where(scores > 0, d_weight, 0.0).to(KIND)
        return add_products(total, d_scores, k_tile, PRECISION)


@triton.jit
def over_keys(k_in, v_in, bias_in, q_tile, g_tile, total, mask, rows, keys, k_n, v_n, mask_n, sharp, bias_m, bias_n,
              D: tl.constexpr, VD: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """The sum of `key_tile_step` over all keys. Without a mask the last tile alone is checked for keys that are
    there."""
    if mask is None:
        whole = keys // N * N
        for _ in tl.range(0, whole, N):
            total = key_tile_step(
                k_in, v_in, bias_in, q_tile, g_tile, total, None, rows, sharp, bias_m, bias_n, D, VD, KIND, PRECISION
            )
            k_in = onward(k_in, N * UNIT * k_n)
            v_in = onward(v_in, N * UNIT * v_n)
            if bias_in is not None:
                bias_in += N * bias_n
        if whole < keys:
            keep = whole + tl.arange(0, N) < keys
            total = key_tile_step(
                k_in, v_in, bias_in, q_tile, g_tile, total, keep[:, None], rows & keep[None, :], sharp, bias_m, bias_n,
                D, VD, KIND, PRECISION,
            )  # fmt: skip
    else:
        for start in tl.range(0, keys, N):
            keep = kept(mask, start, keys, mask_n, N)
            total = key_tile_step(
                k_in, v_in, bias_in, q_tile, g_tile, total, keep[:, None], rows & keep[None, :], sharp, bias_m, bias_n,
                D, VD, KIND, PRECISION,
            )  # fmt: skip
            k_in = onward(k_in, N * UNIT * k_n)
            v_in = onward(v_in, N * UNIT * v_n)
            if bias_in is not None:
                bias_in += N * bias_n
    return total


@triton.jit
def forward_kernel(
    q, k, v, out, mask, inverse, bias, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n,
    mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries, keys, prescale, sharp, factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    PRESCALE: tl.constexpr,
):  # fmt: skip
    """One block of M queries of one head, over all keys."""
    block, batch, head = place(heads, tl.cdiv(queries, M))
    rows = (block * M + tl.arange(0, M) < queries)[:, None]
    q_tile = load(rows_of(q, batch, head, block * M, q_b, q_h, q_n, q_d, M, UNIT, DW, DR), rows, D, KIND)
    if PRESCALE:
        q_tile = scaled(q_tile, prescale)
    k_in = rows_of(k, batch, head, tl.zeros([], tl.int32), k_b, k_h, k_n, k_d, N, UNIT, DW, DR)
    v_in = rows_of(v, batch, head, tl.zeros([], tl.int32), v_b, v_h, v_n, v_d, N, UNIT, VW, VR)
    bias_in = bias
    if bias is not None:
        bias_in = corner_of(bias, batch, head, block * M, bias_b, bias_h, bias_m, period)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    total = over_keys(
        k_in, v_in, bias_in, q_tile, None, zeros(M, VW, VR), mask, rows, keys, k_n, v_n, mask_n, sharp, bias_m, bias_n,
        D, VD, N, UNIT, KIND, PRECISION,
    )  # fmt: skip
    if inverse is not None:
        factor *= tl.load(inverse + batch)
    store(rows_of(out, batch, head, block * M, o_b, o_h, o_n, 1, M, UNIT, VW, VR), total, factor, rows, VD)


@triton.jit
def key_step(q_in, g_in, bias_in, k_tile, v_tile, dk, dv, there, ok_bias, sharp, down, right, D: tl.constexpr,
             VD: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, k_scaled):  # fmt: skip
    """What one tile of queries adds to dk and dv; the scores stand transposed, (keys, queries)."""
    q_tile = load(q_in, there, D, KIND)
    scores = biased(products(k_scaled, q_tile, PRECISION), bias_in, ok_bias, sharp, down, right)
    g_tile = load(g_in, there, VD, KIND)
    dv = add_products(dv, relu(scores).to(KIND), g_tile, PRECISION)
    d_weight = products(v_tile, g_tile, PRECISION)
    d_scores = tl.where(scores > 0, d_weight, 0.0).to(KIND)
    return add_products(dk, d_scores, q_tile, PRECISION), dv


@triton.jit
def key_gradient_kernel(
    q, k, v, g, dk, dv, mask, inverse, bias, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n,
    g_d, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries,
    keys, prescale, sharp, factor, value_factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    PRESCALE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of N keys of one head, over all queries."""
    block, batch, head = place(heads, tl.cdiv(keys, N))
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    keep = kept(mask, block * N, keys, mask_n, N)[:, None]
    k_tile = load(rows_of(k, batch, head, block * N, k_b, k_h, k_n, k_d, N, UNIT, DW, DR), keep, D, KIND)
    v_tile = load(rows_of(v, batch, head, block * N, v_b, v_h, v_n, v_d, N, UNIT, VW, VR), keep, VD, KIND)
    k_scaled = scaled(k_tile, prescale) if PRESCALE else k_tile
    q_in = rows_of(q, batch, head, tl.zeros([], tl.int32), q_b, q_h, q_n, q_d, M, UNIT, DW, DR)
    g_in = rows_of(g, batch, head, tl.zeros([], tl.int32), g_b, g_h, g_n, g_d, M, UNIT, VW, VR)
    bias_in = bias
    if bias is not None:
        bias_in = corner_of(bias, batch, head, block * N, bias_b, bias_h, bias_n, period)
    dk_total, dv_total = zeros(N, DW, DR), zeros(N, VW, VR)
    whole = queries // M * M
    for _ in tl.range(0, whole, M):
        dk_total, dv_total = key_step(
            q_in, g_in, bias_in, k_tile, v_tile, dk_total, dv_total, None, keep, sharp, bias_n, bias_m, D, VD, KIND,
            PRECISION, k_scaled,
        )  # fmt: skip
        q_in = onward(q_in, M * UNIT * q_n)
        g_in = onward(g_in, M * UNIT * g_n)
        if bias is not None:
            bias_in += M * bias_m
    if whole < queries:
        there = whole + tl.arange(0, M) < queries
        dk_total, dv_total = key_step(
            q_in, g_in, bias_in, k_tile, v_tile, dk_total, dv_total, there[:, None], keep & there[None, :], sharp,
            bias_n, bias_m, D, VD, KIND, PRECISION, k_scaled,
        )  # fmt: skip
    if inverse is not None:
        factor *= tl.load(inverse + batch)
        value_factor *= tl.load(inverse + batch)
    own = (block * N + tl.arange(0, N) < keys)[:, None]
    store(rows_of(dk, batch, head, block * N, dk_b, dk_h, dk_n, 1, N, UNIT, DW, DR), dk_total, factor, own, D)
    store(rows_of(dv, batch, head, block * N, dv_b, dv_h, dv_n, 1, N, UNIT, VW, VR), dv_total, value_factor, own, VD)


@triton.jit
def query_gradient_kernel(
    q, k, v, g, dq, mask, inverse, bias, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dq_b, dq_h, dq_n, mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries, keys, sharp, factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one block of M queries of one head, over all keys."""
    block, batch, head = place(heads, tl.cdiv(queries, M))
    rows = (block * M + tl.arange(0, M) < queries)[:, None]
    q_tile = load(rows_of(q, batch, head, block * M, q_b, q_h, q_n, q_d, M, UNIT, DW, DR), rows, D, KIND)
    g_tile = load(rows_of(g, batch, head, block * M, g_b, g_h, g_n, g_d, M, UNIT, VW, VR), rows, VD, KIND)
    k_in = rows_of(k, batch, head, tl.zeros([], tl.int32), k_b, k_h, k_n, k_d, N, UNIT, DW, DR)
    v_in = rows_of(v, batch, head, tl.zeros([], tl.int32), v_b, v_h, v_n, v_d, N, UNIT, VW, VR)
    bias_in = bias
    if bias is not None:
        bias_in = corner_of(bias, batch, head, block * M, bias_b, bias_h, bias_m, period)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    total = over_keys(
        k_in, v_in, bias_in, q_tile, g_tile, zeros(M, DW, DR), mask, rows, keys, k_n, v_n, mask_n, sharp, bias_m,
        bias_n, D, VD, N, UNIT, KIND, PRECISION,
    )  # fmt: skip
    if inverse is not None:
        factor *= tl.load(inverse + batch)
    store(rows_of(dq, batch, head, block * M, dq_b, dq_h, dq_n, 1, M, UNIT, DW, DR), total, factor, rows, D)


@triton.jit
def bias_gradient_kernel(
    q, k, v, g, bias, mask, inverse, out, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n,
    g_d, mask_b, mask_n, bias_b, bias_h, bias_m, bias_n, period, heads, queries, keys, repeats, share, sharp, factor,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The bias's gradient for M queries and N keys of one head, summed over a share of the images that have it."""
    across, parts = tl.cdiv(keys, N), tl.cdiv(repeats, share)
    tile, part, head = place(heads, across * tl.cdiv(queries, M))
    first, left = tile // across * M, tile % across * N
    rows = (first + tl.arange(0, M) < queries)[:, None]
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
        there = keep[:, None]
        q_tile = load(rows_of(q, image, head, first, q_b, q_h, q_n, q_d, M, UNIT, DW, DR), rows, D, KIND)
        k_tile = load(rows_of(k, image, head, left, k_b, k_h, k_n, k_d, N, UNIT, DW, DR), there, D, KIND)
        bias_in = corner_of(bias, image, head, first, bias_b, bias_h, bias_m, period) + left.to(tl.int64) * bias_n
        scores = products(q_tile, k_tile, PRECISION)
        scores = biased(scores, bias_in, rows & keep[None, :], sharp, bias_m, bias_n)
        g_tile = load(rows_of(g, image, head, first, g_b, g_h, g_n, g_d, M, UNIT, VW, VR), rows, VD, KIND)
        v_tile = load(rows_of(v, image, head, left, v_b, v_h, v_n, v_d, N, UNIT, VW, VR), there, VD, KIND)
        d_weight = products(g_tile, v_tile, PRECISION)
        total += tl.where(scores > 0, d_weight * scale, 0.0)
    column = left + tl.arange(0, N)
    at = (part.to(tl.int64) * heads + head) * queries * keys + (first + tl.arange(0, M)).to(tl.int64)[:, None] * keys
    tl.store(out + at + column[None, :], total, mask=rows & (column < keys)[None, :])
