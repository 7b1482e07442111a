# mypy: disable-error-code="no-untyped-def, assignment"
"""GELU(BatchNorm(v)), its statistics and its gradients in Triton; nothing of full size is written but sums in place.

Rows are the tokens of all images, columns the channels of all heads: as they lie in a packed projection, so that no
lane idles for heads of 72. Channels of different heads meet only when partial sums are added up, in fixed order.
"""

import triton
import triton.language as tl

from linvit.kernels.tiles import strides


@triton.jit
def places(ptr, row, column, tokens, stride_b, stride_h, stride_n, stride_d, UNIT: tl.constexpr, DIM: tl.constexpr):
    """Pointers to these columns of these rows."""
    stride_b, stride_h, stride_n = strides(stride_b, stride_h, stride_n, UNIT)
    image = row // tokens  # of 32 bits: a division of 64 is a call
    along = image.to(tl.int64) * stride_b + (row - image * tokens).to(tl.int64) * stride_n
    across = (column // DIM).to(tl.int64) * stride_h + column % DIM * stride_d
    return ptr + along[:, None] + across[None, :]


@triton.jit
def load_channels(ptr, column, some, DIM: tl.constexpr):
    return tl.load(ptr + column % DIM, mask=some, other=0.0).to(tl.float32)[None, :]


@triton.jit
def normalised(x, mean, var, column, some, eps, DIM: tl.constexpr):
    """(x − mean) / √(var + eps), and that root's inverse. The mean goes first: it may be far larger than the rest."""
    inverse = tl.rsqrt(load_channels(var, column, some, DIM) + eps)
    return (x.to(tl.float32) - load_channels(mean, column, some, DIM)) * inverse, inverse


@triton.jit
def below(z):
    """The normal distribution function, GELU(z) = z · below(z)."""
    return 0.5 * (1 + tl.erf(z * 0.7071067811865476))


@triton.jit
def slope(z):
    """GELU's derivative."""
    return below(z) + z * tl.exp(-0.5 * z * z) * 0.3989422804014327


@triton.jit(do_not_specialize=["tokens", "rows", "chunk"])
def moments_kernel(
    v, partial, v_b, v_h, v_n, v_d, tokens, rows, chunk, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
    DIM: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of `chunk` rows each column's mean, from its channel's first sample of all on, and the sum of squares around it:
    partial is (chunks, 2, columns). From there on, because a mean far from zero would leave no digits for the rest."""
    part = tl.program_id(0)
    column = tl.program_id(1) * C + tl.arange(0, C)
    some = column < COLUMNS
    begin, end = part * chunk, min(rows, (part + 1) * chunk)
    origin = tl.load(v + column % DIM * v_d, mask=some, other=0.0).to(tl.float32)[None, :]
    total, square = tl.zeros([BLOCK, C], tl.float32), tl.zeros([BLOCK, C], tl.float32)
    for first in range(begin, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = (row < end)[:, None] & some[None, :]
        x = tl.load(places(v, row, column, tokens, v_b, v_h, v_n, v_d, UNIT, DIM), mask=inside, other=0.0)
        x = tl.where(inside, x.to(tl.float32) - origin, 0.0)
        total, square = total + x, square + x * x
    share = tl.sum(total, 0) / (end - begin)
    line = partial + part * 2 * COLUMNS + column
    tl.store(line, share, mask=some)
    tl.store(line + COLUMNS, tl.sum(square, 0) - share * share * (end - begin), mask=some)


@triton.jit(do_not_specialize=["parts", "rows", "chunk"])
def add_moments(
    partial, v, mean, var, running_mean, running_var, batches, v_d, parts, rows, chunk, momentum, HEADS: tl.constexpr,
    CUMULATIVE: tl.constexpr, DIM: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The mean and variance of each channel, and what nn.BatchNorm makes of its running ones."""
    channel = tl.program_id(0) * C + tl.arange(0, C)
    some = channel < DIM
    total, square = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for first in range(0, parts * HEADS, R):
        one = first + tl.arange(0, R)
        part = one // HEADS
        inside = (part < parts)[:, None] & some[None, :]
        place = partial + (part * (2 * HEADS * DIM) + one % HEADS * DIM)[:, None] + channel[None, :]
        count = (tl.minimum(rows, (part + 1) * chunk) - part * chunk).to(tl.float32)[:, None]
        apart = tl.load(place, mask=inside, other=0.0)
        total += apart * count
        square += tl.load(place + HEADS * DIM, mask=inside, other=0.0) + apart * apart * count
    number = tl.cast(rows, tl.float32) * HEADS
    share = tl.sum(total, 0) / number
    middle = tl.load(v + channel * v_d, mask=some, other=0.0).to(tl.float32) + share
    squares = tl.sum(square, 0) - share * share * number
    squares = tl.where(squares < 0, 0.0, squares)  # NaN stays NaN
    tl.store(mean + channel, middle, mask=some)
    tl.store(var + channel, squares / number, mask=some)
    if batches is not None:
        if CUMULATIVE:
            momentum = 1 / tl.load(batches).to(tl.float32)
        elif tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)
    if running_mean is not None:
        old = tl.load(running_mean + channel, mask=some, other=0.0).to(tl.float32)
        old = old * (1 - momentum) + middle * momentum
        tl.store(running_mean + channel, old.to(running_mean.dtype.element_ty), mask=some)
        old = tl.load(running_var + channel, mask=some, other=0.0).to(tl.float32)
        old = old * (1 - momentum) + squares / (number - 1) * momentum
        tl.store(running_var + channel, old.to(running_var.dtype.element_ty), mask=some)


@triton.jit(do_not_specialize=["tokens", "rows"])
def add_kernel(
    v, out, mean, var, weight, bias, v_b, v_h, v_n, v_d, out_b, out_h, out_n, out_d, tokens, rows, eps,
    COLUMNS: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out += GELU(BatchNorm(v))"""
    blocks: tl.constexpr = (COLUMNS + C - 1) // C
    column = tl.program_id(0) % blocks * C + tl.arange(0, C)
    row = tl.program_id(0) // blocks * BLOCK + tl.arange(0, BLOCK)
    some = column < COLUMNS
    inside = (row < rows)[:, None] & some[None, :]
    x = tl.load(places(v, row, column, tokens, v_b, v_h, v_n, v_d, UNIT, DIM), mask=inside, other=0.0)
    place = places(out, row, column, tokens, out_b, out_h, out_n, out_d, UNIT, DIM)
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x, _ = normalised(x, mean, var, column, some, eps, DIM)
    z = x * load_channels(weight, column, some, DIM) + load_channels(bias, column, some, DIM)
    tl.store(place, (before + z * below(z)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "rows", "chunk"])
def gradient_kernel(
    v, g, dv, mean, var, weight, bias, partial, d_weight, d_bias, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dv_b, dv_h, dv_n, dv_d, tokens, rows, chunk, eps, share, SUMS: tl.constexpr, ADDS: tl.constexpr,
    COLUMNS: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of `chunk` rows, with SUMS each column's sums of dz and of dz · x̂ to partial, (chunks, 2, columns), and with ADDS
    dv += what comes of dz: by d_weight and d_bias, whole, where the statistics are those of v, `share` one over their
    samples; otherwise share is zero."""
    part = tl.program_id(0)
    column = tl.program_id(1) * C + tl.arange(0, C)
    some = column < COLUMNS
    end = min(rows, (part + 1) * chunk)
    w, b = load_channels(weight, column, some, DIM), load_channels(bias, column, some, DIM)
    if d_weight is not None:
        of_x = load_channels(d_weight, column, some, DIM) * share
        of_one = load_channels(d_bias, column, some, DIM) * share
    total, product = tl.zeros([BLOCK, C], tl.float32), tl.zeros([BLOCK, C], tl.float32)
    for first in range(part * chunk, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = (row < end)[:, None] & some[None, :]
        x = tl.load(places(v, row, column, tokens, v_b, v_h, v_n, v_d, UNIT, DIM), mask=inside, other=0.0)
        dz = tl.load(places(g, row, column, tokens, g_b, g_h, g_n, g_d, UNIT, DIM), mask=inside, other=0.0)
        x, inverse = normalised(x, mean, var, column, some, eps, DIM)
        dz = dz.to(tl.float32) * slope(x * w + b)
        if SUMS:
            total, product = total + dz, product + dz * x
        if ADDS:
            place = places(dv, row, column, tokens, dv_b, dv_h, dv_n, dv_d, UNIT, DIM)
            if d_weight is not None:
                dz -= of_one + of_x * x
            dx = tl.load(place, mask=inside, other=0.0).to(tl.float32) + dz * w * inverse
            tl.store(place, dx.to(dv.dtype.element_ty), mask=inside)
    if SUMS:
        line = partial + part * 2 * COLUMNS + column
        tl.store(line, tl.sum(total, 0), mask=some)
        tl.store(line + COLUMNS, tl.sum(product, 0), mask=some)


@triton.jit(do_not_specialize=["parts"])
def add_gradients(partial, d_weight, d_bias, parts, HEADS: tl.constexpr, DIM: tl.constexpr, C: tl.constexpr,
                  R: tl.constexpr):  # fmt: skip
    """The sums of all parts and heads, in float32."""
    channel = tl.program_id(0) * C + tl.arange(0, C)
    some = channel < DIM
    total, product = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for first in range(0, parts * HEADS, R):
        one = first + tl.arange(0, R)
        inside = (one < parts * HEADS)[:, None] & some[None, :]
        place = partial + (one // HEADS * (2 * HEADS * DIM) + one % HEADS * DIM)[:, None] + channel[None, :]
        total += tl.load(place, mask=inside, other=0.0)
        product += tl.load(place + HEADS * DIM, mask=inside, other=0.0)
    tl.store(d_bias + channel, tl.sum(total, 0), mask=some)
    tl.store(d_weight + channel, tl.sum(product, 0), mask=some)
