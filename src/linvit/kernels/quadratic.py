"""What kernels that walk over the tiles of q · kᵀ are made of: tokens of one head, loaded, multiplied and stored.

Tiles are powers of two wide; heads of 72 to 96 channels lie in two, 64 and 16 or 32 wide, and so do 80 channels not
cost 128. Whatever has a head's channels is a tuple of its pieces.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl


@triton.jit
def rows_of(ptr, batch, head, start, stride_b, stride_h, stride_n, stride_d, ROWS: tl.constexpr, UNIT: tl.constexpr,
            WIDTH: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Pointers to ROWS tokens from `start` on, (ROWS, WIDTH) and (ROWS, REST); strides but the last are in UNITs."""
    first = batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + start.to(tl.int64) * stride_n
    ptr += first * UNIT
    row = tl.arange(0, ROWS)[:, None] * (stride_n * UNIT)
    out = (ptr + (row + tl.arange(0, WIDTH)[None, :] * stride_d),)
    if REST:
        out += (ptr + (row + (tl.arange(0, REST) + WIDTH)[None, :] * stride_d),)
    return out


@triton.jit
def onward(pointers, step):
    out = ()
    for i in tl.static_range(len(pointers)):
        out += (pointers[i] + step,)
    return out


@triton.jit
def load(pointers, rows, D: tl.constexpr, KIND: tl.constexpr):
    """D channels of the tokens that are there, which all are where `rows` is None. The last piece alone is padded."""
    out = ()
    WIDTH: tl.constexpr = pointers[0].shape[1]
    for i in tl.static_range(len(pointers)):
        if i * WIDTH + pointers[i].shape[1] <= D:
            x = tl.load(pointers[i]) if rows is None else tl.load(pointers[i], mask=rows, other=0.0)
        else:
            inside = (tl.arange(0, pointers[i].shape[1]) + i * WIDTH < D)[None, :]
            if rows is not None:
                inside = rows & inside
            x = tl.load(pointers[i], mask=inside, other=0.0)
        out += (x.to(KIND),)
    return out


@triton.jit
def store(pointers, value, factor, rows, D: tl.constexpr):
    WIDTH: tl.constexpr = pointers[0].shape[1]
    for i in tl.static_range(len(pointers)):
        inside = rows & (tl.arange(0, pointers[i].shape[1]) + i * WIDTH < D)[None, :]
        tl.store(pointers[i], (value[i] * factor).to(pointers[i].dtype.element_ty), mask=inside)


@triton.jit
def scaled(x, factor):
    out = ()
    for i in tl.static_range(len(x)):
        out += ((x[i] * factor).to(x[i].dtype),)
    return out


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    out = (tl.zeros([ROWS, WIDTH], tl.float32),)
    if REST:
        out += (tl.zeros([ROWS, REST], tl.float32),)
    return out


@triton.jit
def products(x, y, PRECISION: tl.constexpr):
    """x · yᵀ, summed over the pieces."""
    total = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(x)):
        total = tl.dot(x[i], tl.trans(y[i]), total, input_precision=PRECISION)
    return total


@triton.jit
def add_products(total, weight, x, PRECISION: tl.constexpr):
    """total + weight · x, piece by piece."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (tl.dot(weight, x[i], total[i], input_precision=PRECISION),)
    return out


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
