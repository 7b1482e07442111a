# mypy: disable-error-code="no-untyped-def, assignment"
"""A depthwise filter of the values over the token grid, and its gradients, in Triton.

A program takes a block of tokens in raster order and a block of one head's channels, and reads the tile once for each
tap, shifted: all but the first come from the cache. Sums are in float32. Tokens before the grid are left out.
"""

import triton
import triton.language as tl

from linvit.kernels.local import bands
from linvit.kernels.tiles import settled, strides


@triton.jit
def start_of(ptr, batch, head, stride_b, stride_h):
    return ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def neighbours(row, column, dy, dx, height, width):
    """Which tokens have a neighbour so many rows and columns on."""
    row, column = row + dy, column + dx
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit(do_not_specialize=["heads", "height", "width", "prefix"])
def filter_kernel(
    v, weight, bias, base, out, v_b, v_h, v_n, v_d, base_b, base_h, base_n, base_d, out_b, out_h, out_n, out_d,
    w_b, w_h, w_d, w_y, w_x, bias_h, bias_d, heads, height, width, prefix,
    UNIT: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """out = base + filter(v) + bias, the filter turned round where BACK: v is then the gradient of the output."""
    v_b, v_h, v_n = strides(v_b, v_h, v_n, UNIT)
    base_b, base_h, base_n = strides(base_b, base_h, base_n, UNIT)
    out_b, out_h, out_n = strides(out_b, out_h, out_n, UNIT)
    blocks = tl.cdiv(prefix + height * width, BLOCK)  # of tokens; in one axis of the grid, for a second one is short
    pid = tl.program_id(0) // blocks
    channel = pid % BLOCKS * C + tl.arange(0, C)
    head, batch = pid // BLOCKS % heads, pid // (BLOCKS * heads)
    tokens = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    some = channel < DIM
    patch = tokens - prefix
    row, column = patch // width, patch % width  # of 32 bits: the chip divides 64 in a hundred instructions
    rows, patches = tokens < prefix + height * width, patch >= 0
    tokens = tokens.to(tl.int64)
    values = start_of(v, batch, head, v_b, v_h) + tokens[:, None] * v_n + channel[None, :] * v_d
    filters = start_of(weight, batch, head, w_b, w_h) + channel * w_d
    total = tl.zeros([BLOCK, C], tl.float32)
    for y in tl.static_range(KH):
        for x in tl.static_range(KW):
            dy, dx = (KH // 2 - y, KW // 2 - x) if BACK else (y - KH // 2, x - KW // 2)
            near = neighbours(row, column, dy, dx, height, width) & patches & rows
            one = tl.load(values + (dy * width + dx) * v_n, mask=near[:, None] & some[None, :], other=0.0)
            tap = tl.load(filters + y * w_y + x * w_x, mask=some, other=0.0)
            total += one.to(tl.float32) * tap.to(tl.float32)[None, :]
    if bias is not None:
        shift = tl.load(bias + head * bias_h + channel * bias_d, mask=some, other=0.0).to(tl.float32)
        total += tl.where(patches[:, None], shift[None, :], 0.0)
    inside = rows[:, None] & some[None, :]
    if base is not None:
        before = start_of(base, batch, head, base_b, base_h) + tokens[:, None] * base_n + channel[None, :] * base_d
        total += tl.load(before, mask=inside, other=0.0).to(tl.float32)
    place = start_of(out, batch, head, out_b, out_h) + tokens[:, None] * out_n + channel[None, :] * out_d
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_taps(totals, values, g, row, column, ok, some, v_n, height, width, FIRST, ROWS: tl.constexpr, KH: tl.constexpr,
             KW: tl.constexpr):  # fmt: skip
    """totals + g · v at each tap of ROWS rows of the filter from FIRST on, token by token; the last is g alone."""
    out = ()
    for y in tl.static_range(ROWS):
        for x in tl.static_range(KW):
            dy, dx = FIRST + y - KH // 2, x - KW // 2
            near = neighbours(row, column, dy, dx, height, width) & ok
            one = tl.load(values + (dy * width + dx) * v_n, mask=near[:, None] & some[None, :], other=0.0)
            out += (totals[y * KW + x] + one.to(tl.float32) * g,)
    out += (totals[ROWS * KW] + g,)
    return out


@triton.jit(do_not_specialize=["batch", "heads", "height", "width", "prefix", "share", "chunk"])
def weight_gradient_kernel(
    v, g, partial, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, batch, heads, height, width, prefix, share, chunk,
    UNIT: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of `share` images and `chunk` patches the sums of g · v at each tap and of g: partial is (images, chunks, heads,
    DIM, KH · KW + 1)."""
    v_b, v_h, v_n = strides(v_b, v_h, v_n, UNIT)
    g_b, g_h, g_n = strides(g_b, g_h, g_n, UNIT)
    pid, part, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * ROWS
    channel = pid % BLOCKS * C + tl.arange(0, C)
    head = pid // BLOCKS % heads
    image = pid // (BLOCKS * heads)
    some = channel < DIM
    totals = ()
    for _ in tl.static_range(ROWS * KW + 1):
        totals += (tl.zeros([BLOCK, C], tl.float32),)
    end = min(height * width, (part + 1) * chunk)
    for b in range(image * share, min(batch, (image + 1) * share)):
        of_v, of_g = v + tl.cast(b, tl.int64) * v_b + head * v_h, g + tl.cast(b, tl.int64) * g_b + head * g_h
        for start in range(part * chunk, end, BLOCK):
            patch = start + tl.arange(0, BLOCK)
            ok = patch < end
            tokens = (patch + prefix).to(tl.int64)[:, None]
            place = of_g + tokens * g_n + channel[None, :] * g_d
            one = tl.load(place, mask=ok[:, None] & some[None, :], other=0.0).to(tl.float32)
            values = of_v + tokens * v_n + channel[None, :] * v_d
            totals = add_taps(totals, values, one, patch // width, patch % width, ok, some, v_n, height, width, first,
                              ROWS, KH, KW)  # fmt: skip
    line = ((tl.cast(image, tl.int64) * tl.num_programs(1) + part) * heads + head) * DIM + channel
    for t in tl.static_range(ROWS * KW):
        tl.store(partial + line * (KH * KW + 1) + first * KW + t, tl.sum(totals[t], 0), mask=some)
    if first == 0:
        tl.store(partial + line * (KH * KW + 1) + KH * KW, tl.sum(totals[ROWS * KW], 0), mask=some)


@triton.jit
def window(ptr, first, stride_n, stride_d, channel, tokens, DIM: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr):
    """ROWS tokens from `first` on, zero where there are none; a tuple of one piece."""
    token = first + tl.arange(0, ROWS)
    inside = ((token >= 0) & (token < tokens))[:, None] & (channel < DIM)[None, :]
    place = ptr + token.to(tl.int64)[:, None] * stride_n + channel[None, :] * stride_d
    return (tl.load(place, mask=inside, other=0.0).to(TYPE),)


@triton.jit
def diagonals(total, FIRST: tl.constexpr, TAP: tl.constexpr, TAPS: tl.constexpr):
    """Sums over what of a product of tokens with tokens is TAP's, row by row."""
    tap = bands.taps(FIRST, total.shape[1], TAPS, total.shape[0])
    return tl.sum(tl.where(tap == TAP, total, 0.0), 1)


@triton.jit(do_not_specialize=["heads", "tokens", "chunk"])
def token_gradient_kernel(
    v, g, dv, weight, partial, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dv_b, dv_h, dv_n, dv_d, w_h, w_n,
    heads, tokens, chunk, WEIGHS: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a filter along the tokens: adds to dv, and leaves sums of g · v at each tap, one for each program."""
    v_b, v_h, v_n = strides(v_b, v_h, v_n, UNIT)
    g_b, g_h, g_n = strides(g_b, g_h, g_n, UNIT)
    dv_b, dv_h, dv_n = strides(dv_b, dv_h, dv_n, UNIT)
    pid, part = tl.program_id(0), tl.program_id(1)
    channel = pid % BLOCKS * C + tl.arange(0, C)
    head, batch = pid // BLOCKS % heads, pid // (BLOCKS * heads)
    v, g = start_of(v, batch, head, v_b, v_h), start_of(g, batch, head, g_b, g_h)
    dv = start_of(dv, batch, head, dv_b, dv_h)
    near = bands.bands(weight, head, heads, w_h, w_n, TAPS, BLOCK, True, 1, COMPUTE)
    before = tl.zeros([BLOCK, bands.SIDE], tl.float32)
    own = tl.zeros([BLOCK, BLOCK], tl.float32)
    after = tl.zeros([BLOCK, bands.SIDE], tl.float32)
    for start in range(part * chunk, min(tokens, (part + 1) * chunk), BLOCK):
        g_before = window(g, start - bands.SIDE, g_n, g_d, channel, tokens, DIM, bands.SIDE, COMPUTE)
        g_own = window(g, start, g_n, g_d, channel, tokens, DIM, BLOCK, COMPUTE)
        g_after = window(g, start + BLOCK, g_n, g_d, channel, tokens, DIM, bands.SIDE, COMPUTE)
        if WEIGHS:
            v_before = window(v, start - bands.SIDE, v_n, v_d, channel, tokens, DIM, bands.SIDE, COMPUTE)
            v_own = window(v, start, v_n, v_d, channel, tokens, DIM, BLOCK, COMPUTE)
            v_after = window(v, start + BLOCK, v_n, v_d, channel, tokens, DIM, bands.SIDE, COMPUTE)
            own = tl.dot(g_own[0], tl.trans(v_own[0]), own, input_precision=PRECISION)
            before = tl.dot(g_own[0], tl.trans(v_before[0]), before, input_precision=PRECISION)
            after = tl.dot(g_own[0], tl.trans(v_after[0]), after, input_precision=PRECISION)
            before, own, after = settled((before, own, after))
        total = bands.filtered(near, g_before, g_own, g_after, 1, PRECISION)[0]
        token = start + tl.arange(0, BLOCK)
        place = dv + token.to(tl.int64)[:, None] * dv_n + channel[None, :] * dv_d
        inside = (token < tokens)[:, None] & (channel < DIM)[None, :]
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, total.to(dv.dtype.element_ty), mask=inside)
    if WEIGHS:
        line = ((tl.cast(batch, tl.int64) * heads + head) * BLOCKS + pid % BLOCKS) * tl.num_programs(1) + part
        for tap in tl.static_range(TAPS):
            sums = diagonals(before, -bands.SIDE, tap, TAPS) + diagonals(own, 0, tap, TAPS)
            sums += diagonals(after, BLOCK, tap, TAPS)
            tl.store(partial + line * TAPS + tap, tl.sum(sums))
