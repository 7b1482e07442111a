"""Triton code of angular attention: `weight_ij = 1 − acos(q̂_i · k̂_j)/π`, rows divided by their sum, tile by tile.

It is flash attention with the angle in the place of the exponential. A weight is at most one, so there is no row
maximum and nothing to rescale; the row sums, and one over the keys' lengths, are saved for the backward pass.

What a score costs decides the speed, for a product with 64 channels takes no longer than eight instructions. So the
own tokens' lengths, of queries or in the keys' gradient of keys, go into the coefficients of the polynomial, a row its
own; with the tokens brought to lengths from 1 to 2 by powers of two, which is exact, no power of a length is too large
or small. The others' lengths take one multiplication. q and k stay as they are: to round them once they have length one
would cost digits where the angle needs them most.

A key that is not there, or is masked, is loaded as zero, and zero has half the weight: row sums leave it out. In the
gradients it meets zeros, and its own is set to zero.
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
from linvit.kernels.tiles import INTERPRETED, settled, where

INVERSE_PI = tl.constexpr(0.3183098861837907)
NEAREST = tl.constexpr(2.0**-22)  # how far from 1 the square of a cosine stays where the slope is infinite: 1 − 1e-7
LARGEST = tl.constexpr(65504.0)  # of float16


@triton.jit
def root(x):
    """√|x| in one instruction, of which an absolute value that the compiler sees would be another; what is below zero
    is so by rounding alone."""
    if INTERPRETED:
        return tl.sqrt(tl.abs(x))
    code: tl.constexpr = "{.reg .f32 a; abs.f32 a, $1; sqrt.approx.ftz.f32 $0, a;}"
    return tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse_root(x):
    if INTERPRETED:
        return 1 / tl.sqrt(x)
    return tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def along(x, y):
    """Sums of x·y over the channels: (rows,)."""
    total = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(x)):
        total += tl.sum(x[i].to(tl.float32) * y[i].to(tl.float32), 1)
    return total


@triton.jit
def inverse_lengths(x, eps):
    return 1 / tl.maximum(tl.sqrt_rn(along(x, x)), eps)


@triton.jit
def measured(x, eps):
    """The tokens at lengths from 1 to 2, these lengths, what they were multiplied with, and which are longer than eps;
    all but the tokens (rows, 1)."""
    length = tl.sqrt_rn(along(x, x))[:, None]
    longer = length >= eps
    length = tl.maximum(length, eps)
    power = (0x7F000000 - (length.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
    return scaled(x, power), length * power, power, longer


@triton.jit
def terms_of(length, EXACT: tl.constexpr):
    """Of acos(x) / (π·√(1 − x)), as a polynomial in 1 − x, the coefficients for cosines that are `length` times as
    large. It comes within 1.5e-5 of the angle over π, EXACT within 5e-8, and to a half at a right angle."""
    if EXACT:
        terms = (0.4501586, 0.0374976955, 0.00859407429, 0.00184966845, 0.00228003832, -0.00123296957, 0.000852884958)
    else:
        terms = (0.450037658, 0.0389174484, 0.00415622722, 0.00688867224)
    inverse = 1 / length
    factor = tl.sqrt_rn(inverse)
    out = ()
    for i in tl.static_range(len(terms)):
        out += (factor * terms[i],)
        factor *= inverse
    return out


@triton.jit
def weights(cosines, length, terms):
    """1 − θ/π of cosines that are `length` times as large."""
    rest = length - tl.abs(cosines)
    LAST: tl.constexpr = len(terms) - 1
    angle = terms[LAST]
    for i in tl.static_range(LAST):
        angle = angle * rest + terms[LAST - 1 - i]
    above = 0.5 - root(rest) * angle
    sign = cosines.to(tl.int32, bitcast=True) & -2147483648
    return 0.5 + (above.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def slopes(d_weight, cosines, square, floor, inverse, KIND: tl.constexpr):
    """π times the gradient of the scores, but for their own rows' factor. One that float16 cannot hold stays finite,
    or zeros would make it NaN."""
    out = d_weight * (inverse_root(tl.maximum(square - cosines * cosines, floor)) * inverse)
    if KIND == tl.float16:  # noqa: SIM300
        out = tl.minimum(out, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        out = tl.maximum(out, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return out.to(KIND)


@triton.jit
def across(total, x, length, longer):
    """A gradient less its part along the tokens, which lengths take away; those cut at eps keep it."""
    much = tl.where(longer, along(total, x)[:, None] / (length * length), 0.0)
    out = ()
    for i in tl.static_range(len(x)):
        out += (total[i] - much * x[i].to(tl.float32),)
    return out


@triton.jit
def numbers(ptr, keep):
    """A number for each token."""
    return tl.load(ptr) if keep is None else tl.load(ptr, mask=keep, other=0.0)


@triton.jit
def lengths_kernel(k, inverse, k_b, k_h, k_n, k_d, heads, keys, eps, D: tl.constexpr, DW: tl.constexpr,
                   DR: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """One over the lengths of N keys of one head."""
    block, batch, head = place(heads, tl.cdiv(keys, N))
    token = block * N + tl.arange(0, N)
    x = load(rows_of(k, batch, head, block * N, k_b, k_h, k_n, k_d, N, UNIT, DW, DR), (token < keys)[:, None], D,
             tl.float32)  # fmt: skip
    at = inverse + (batch.to(tl.int64) * heads + head) * keys + token
    tl.store(at, inverse_lengths(x, eps), mask=token < keys)


@triton.jit
def key_tile_step(k_in, v_in, inverse_in, q_tile, length, terms, g_tile, less, total, sums, keep, eps, D: tl.constexpr,
                  VD: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What one tile of keys adds to output and row sums; to dq where there is a `g_tile`."""
    there = None if keep is None else keep[:, None]
    k_tile = load(k_in, there, D, KIND)
    inverse = inverse_lengths(k_tile, eps) if inverse_in is None else numbers(inverse_in, keep)
    cosines = products(q_tile, k_tile, PRECISION) * inverse[None, :]
    v_tile = load(v_in, there, VD, KIND)
    if g_tile is None:
        weight = weights(cosines, length, terms)
        if keep is not None:
            weight = tl.where(keep[None, :], weight, 0.0)
        return settled(add_products(total, weight.to(KIND), v_tile, PRECISION)), sums + tl.sum(weight, 1)
    else:
        square = length * length
        d_weight = products(g_tile, v_tile, PRECISION) - less
        slope = slopes(d_weight, cosines, square, square * NEAREST, inverse[None, :], KIND)
        return settled(add_products(total, slope, k_tile, PRECISION)), sums


@triton.jit
def over_keys(k_in, v_in, inverse_in, q_tile, length, terms, g_tile, less, total, mask, keys, k_n, v_n, mask_n, eps,
              D: tl.constexpr, VD: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """The sums of `key_tile_step` over all keys. Without a mask the last tile alone is checked for keys that are
    there."""
    sums = tl.zeros([length.shape[0]], tl.float32)
    if mask is None:
        whole = keys // N * N
        for _ in tl.range(0, whole, N):
            total, sums = key_tile_step(
                k_in, v_in, inverse_in, q_tile, length, terms, g_tile, less, total, sums, None, eps, D, VD, KIND,
                PRECISION,
            )  # fmt: skip
            k_in = onward(k_in, N * UNIT * k_n)
            v_in = onward(v_in, N * UNIT * v_n)
            if inverse_in is not None:
                inverse_in += N
        if whole < keys:
            total, sums = key_tile_step(
                k_in, v_in, inverse_in, q_tile, length, terms, g_tile, less, total, sums,
                whole + tl.arange(0, N) < keys, eps, D, VD, KIND, PRECISION,
            )  # fmt: skip
    else:
        for start in tl.range(0, keys, N):
            total, sums = key_tile_step(
                k_in, v_in, inverse_in, q_tile, length, terms, g_tile, less, total, sums,
                kept(mask, start, keys, mask_n, N), eps, D, VD, KIND, PRECISION,
            )  # fmt: skip
            k_in = onward(k_in, N * UNIT * k_n)
            v_in = onward(v_in, N * UNIT * v_n)
            if inverse_in is not None:
                inverse_in += N
    return total, sums


@triton.jit
def forward_kernel(
    q, k, v, out, sums, inverse, mask, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n,
    mask_b, mask_n, heads, queries, keys, eps, sum_eps,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of M queries of one head, over all keys."""
    block, batch, head = place(heads, tl.cdiv(queries, M))
    row = block * M + tl.arange(0, M)
    rows = (row < queries)[:, None]
    q_tile = load(rows_of(q, batch, head, block * M, q_b, q_h, q_n, q_d, M, UNIT, DW, DR), rows, D, KIND)
    q_tile, length, _, _ = measured(q_tile, eps)
    k_in = rows_of(k, batch, head, tl.zeros([], tl.int32), k_b, k_h, k_n, k_d, N, UNIT, DW, DR)
    v_in = rows_of(v, batch, head, tl.zeros([], tl.int32), v_b, v_h, v_n, v_d, N, UNIT, VW, VR)
    index = batch.to(tl.int64) * heads + head
    inverse_in = None if inverse is None else inverse + (index * keys + tl.arange(0, N))
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    total, row_sums = over_keys(
        k_in, v_in, inverse_in, q_tile, length, terms_of(length, PRECISION == "tf32x3"), None, None, zeros(M, VW, VR),
        mask, keys, k_n, v_n, mask_n, eps, D, VD, N, UNIT, KIND, PRECISION,
    )  # fmt: skip
    row_sums += sum_eps
    if sums is not None:
        tl.store(sums + index * queries + row, row_sums, mask=row < queries)
    store(rows_of(out, batch, head, block * M, o_b, o_h, o_n, 1, M, UNIT, VW, VR), total, 1 / row_sums[:, None], rows,
          VD)  # fmt: skip


@triton.jit
def query_gradient_kernel(
    q, k, v, g, out, dq, divided, less, q_inverse, sums, inverse, mask, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b,
    v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, dq_b, dq_h, dq_n, x_b, x_h, x_n, mask_b, mask_n, heads, queries,
    keys, eps, usual_sum,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one block of M queries of one head, over all keys; and for the keys' gradient, of each query: its part of g
    `divided` by the row sum, the products of that with the output, and one over its length."""
    block, batch, head = place(heads, tl.cdiv(queries, M))
    row = block * M + tl.arange(0, M)
    rows = (row < queries)[:, None]
    index = batch.to(tl.int64) * heads + head
    g_tile = load(rows_of(g, batch, head, block * M, g_b, g_h, g_n, g_d, M, UNIT, VW, VR), rows, VD, KIND)
    o_tile = load(rows_of(out, batch, head, block * M, o_b, o_h, o_n, 1, M, UNIT, VW, VR), rows, VD, tl.float32)
    over = along(g_tile, o_tile)[:, None]
    share = 1 / tl.load(sums + index * queries + row, mask=row < queries, other=1.0)[:, None]
    at = index * queries + row[:, None]
    store(
        rows_of(divided, batch, head, block * M, x_b, x_h, x_n, 1, M, UNIT, VW, VR), g_tile, usual_sum * share, rows, VD
    )
    tl.store(less + at, usual_sum * share * over, mask=rows)
    q_tile = load(rows_of(q, batch, head, block * M, q_b, q_h, q_n, q_d, M, UNIT, DW, DR), rows, D, KIND)
    q_tile, length, power, longer = measured(q_tile, eps)
    tl.store(q_inverse + at, power / length, mask=rows)
    k_in = rows_of(k, batch, head, tl.zeros([], tl.int32), k_b, k_h, k_n, k_d, N, UNIT, DW, DR)
    v_in = rows_of(v, batch, head, tl.zeros([], tl.int32), v_b, v_h, v_n, v_d, N, UNIT, VW, VR)
    inverse_in = None if inverse is None else inverse + (index * keys + tl.arange(0, N))
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    total, _ = over_keys(
        k_in, v_in, inverse_in, q_tile, length, None, g_tile, over, zeros(M, DW, DR), mask, keys, k_n, v_n, mask_n, eps,
        D, VD, N, UNIT, KIND, PRECISION,
    )  # fmt: skip
    total = across(total, q_tile, length, longer)
    factor = power * share * INVERSE_PI
    store(rows_of(dq, batch, head, block * M, dq_b, dq_h, dq_n, 1, M, UNIT, DW, DR), total, factor, rows, D)


@triton.jit
def key_step(q_in, g_in, less_in, inverse_in, k_tile, v_tile, length, terms, dk, dv, keep, D: tl.constexpr,
             VD: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What one tile of queries adds to dk and dv; the scores stand transposed, (keys, queries)."""
    there = None if keep is None else keep[:, None]
    q_tile = load(q_in, there, D, KIND)
    inverse = numbers(inverse_in, keep)[None, :]
    cosines = products(k_tile, q_tile, PRECISION) * inverse
    g_tile = load(g_in, there, VD, KIND)
    dv = add_products(dv, weights(cosines, length, terms).to(KIND), g_tile, PRECISION)
    d_weight = products(v_tile, g_tile, PRECISION) - numbers(less_in, keep)[None, :]
    square = length * length
    slope = slopes(d_weight, cosines, square, square * NEAREST, inverse, KIND)
    return settled(add_products(dk, slope, q_tile, PRECISION)), settled(dv)


@triton.jit
def key_gradient_kernel(
    q, k, v, divided, less, q_inverse, dk, dv, mask, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, x_b,
    x_h, x_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_n, heads, queries, keys, eps, usual_sum,
    D: tl.constexpr, VD: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of N keys of one head, over all queries."""
    block, batch, head = place(heads, tl.cdiv(keys, N))
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    keep = kept(mask, block * N, keys, mask_n, N)[:, None]
    k_tile = load(rows_of(k, batch, head, block * N, k_b, k_h, k_n, k_d, N, UNIT, DW, DR), keep, D, KIND)
    v_tile = load(rows_of(v, batch, head, block * N, v_b, v_h, v_n, v_d, N, UNIT, VW, VR), keep, VD, KIND)
    k_tile, length, power, longer = measured(k_tile, eps)
    terms = terms_of(length, PRECISION == "tf32x3")
    q_in = rows_of(q, batch, head, tl.zeros([], tl.int32), q_b, q_h, q_n, q_d, M, UNIT, DW, DR)
    g_in = rows_of(divided, batch, head, tl.zeros([], tl.int32), x_b, x_h, x_n, 1, M, UNIT, VW, VR)
    first = (batch.to(tl.int64) * heads + head) * queries + tl.arange(0, M)
    less_in, inverse_in = less + first, q_inverse + first
    dk_total, dv_total = zeros(N, DW, DR), zeros(N, VW, VR)
    whole = queries // M * M
    for _ in tl.range(0, whole, M):
        dk_total, dv_total = key_step(
            q_in, g_in, less_in, inverse_in, k_tile, v_tile, length, terms, dk_total, dv_total, None, D, VD, KIND,
            PRECISION,
        )  # fmt: skip
        q_in = onward(q_in, M * UNIT * q_n)
        g_in = onward(g_in, M * UNIT * x_n)
        less_in += M
        inverse_in += M
    if whole < queries:
        dk_total, dv_total = key_step(
            q_in, g_in, less_in, inverse_in, k_tile, v_tile, length, terms, dk_total, dv_total,
            whole + tl.arange(0, M) < queries, D, VD, KIND, PRECISION,
        )  # fmt: skip
    dk_total, dv_total = where(keep, across(dk_total, k_tile, length, longer)), where(keep, dv_total)
    factor = power * (INVERSE_PI / usual_sum)
    own = (block * N + tl.arange(0, N) < keys)[:, None]
    store(rows_of(dk, batch, head, block * N, dk_b, dk_h, dk_n, 1, N, UNIT, DW, DR), dk_total, factor, own, D)
    store(rows_of(dv, batch, head, block * N, dv_b, dv_h, dv_n, 1, N, UNIT, VW, VR), dv_total, 1 / usual_sum, own, VD)
