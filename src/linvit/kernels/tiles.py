# mypy: disable-error-code="no-untyped-def, assignment"
"""What the kernels of all ops are made of: tiles of tokens, and a head's channels in one piece or two.

Tiles are powers of two wide, and a head of 80 channels would waste more than half of every product in one of 128. So it
may lie in two, 64 and 16 wide. Whatever has a head's channels is therefore a tuple of its pieces, and a state the tuple
of products of each piece of the keys with each piece of the values. Heads that share a tile, G of them, have one piece.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def settled(totals):
    """Sums of matrix products carried through a loop, when the last products are done: nothing but a wait.

    On Hopper a product may read its left operand from registers after the loop has gone on, and Triton 3.6 lets the
    next round write to them (triton-lang/triton#9433). A use in the loop, here one that does nothing, makes it wait;
    after all products of a round, so that these need not wait for each other.
    """
    out = ()
    for i in tl.static_range(len(totals)):
        if INTERPRETED:
            out += (totals[i],)
        else:
            out += (tl.inline_asm_elementwise("", "=f,0", [totals[i]], dtype=tl.float32, is_pure=True, pack=1),)
    return out


@triton.jit
def spread(x, G: tl.constexpr, WIDTH: tl.constexpr):
    """A number per head to each of its columns: (rows, G) to (rows, G·WIDTH), or (rows, 1) which broadcasts."""
    if G > 1:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], [x.shape[0], G, WIDTH]), [x.shape[0], G * WIDTH])
    return x


@triton.jit
def head_sums(x, y, G: tl.constexpr):
    """Sums of x·y over the channels of each head: (rows, G)."""
    total = _sums(x[0] * y[0], G)
    for i in tl.static_range(1, len(x)):
        total += _sums(x[i] * y[i], G)
    return total


@triton.jit
def _sums(x, G: tl.constexpr):
    return tl.sum(x, 1)[:, None] if G == 1 else tl.sum(tl.reshape(x, [x.shape[0], G, x.shape[1] // G]), 2)


@triton.jit
def head_maxima(x, G: tl.constexpr):
    """The largest of each head's channels: (rows, G)."""
    most = _maxima(x[0], G)
    for i in tl.static_range(1, len(x)):
        most = tl.maximum(most, _maxima(x[i], G))
    return most


@triton.jit
def _maxima(x, G: tl.constexpr):
    return tl.max(x, 1)[:, None] if G == 1 else tl.max(tl.reshape(x, [x.shape[0], G, x.shape[1] // G]), 2)


@triton.jit
def scaled(x, factor, G: tl.constexpr):
    """Each head's channels times its own factor, (rows, G)."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i] * spread(factor, G, x[i].shape[1] // G),)
    return out


@triton.jit
def plus(x, y):
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i] + y[i],)
    return out


@triton.jit
def outer(x, y, G: tl.constexpr):
    """A number per row and head, (rows, G), times a vector per piece."""
    out = ()
    for i in tl.static_range(len(y)):
        out += (spread(x, G, y[i].shape[0] // G) * y[i][None, :],)
    return out


@triton.jit
def each_times(x, factor):
    """Every number times one factor."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i] * factor,)
    return out


@triton.jit
def multiples(x, factor):
    """A vector per piece times one factor, as a row that broadcasts over tokens."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i][None, :] * factor,)
    return out


@triton.jit
def first_columns(x):
    """Of sums that stand in each of 16 columns one: (channels, 16) to (channels,)."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (tl.sum(x[i], 1) * 0.0625,)
    return out


@triton.jit
def as_type(x, TYPE: tl.constexpr):
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i].to(TYPE),)
    return out


@triton.jit
def where(keep, x):
    """Zero in rows that are not kept."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (tl.where(keep, x[i], 0.0),)
    return out


@triton.jit
def strides(batch, head, token, UNIT: tl.constexpr):
    """Strides that were given in units, see `fused.in_units`."""
    return tl.cast(batch, tl.int64) * UNIT, tl.cast(head, tl.int64) * UNIT, token * UNIT


@triton.jit
def tiles(ptr, batch, head, first, stride_b, stride_h, stride_n, stride_d, BLOCK: tl.constexpr, G: tl.constexpr,
          WIDTH: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Pointers to BLOCK tokens of G heads from `head` on: WIDTH channels each from `first` on, and the REST of them."""
    start = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    token = tl.arange(0, BLOCK)[:, None] * stride_n
    column = tl.arange(0, G * WIDTH)
    inner = (first + column % WIDTH) * stride_d
    if G > 1:
        inner += (column // WIDTH).to(tl.int64) * stride_h
    out = (start + (token + inner[None, :]),)
    if REST:
        out += (start + (token + ((first + WIDTH + tl.arange(0, REST)) * stride_d)[None, :]),)
    return out


@triton.jit
def columns(head, heads, first, dim, G: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """Which of the tiles' columns are channels of a head, not padding: (1, columns) for each piece."""
    column = tl.arange(0, G * WIDTH)
    out = (((head + column // WIDTH < heads) & (first + column % WIDTH < dim))[None, :],)
    if REST:
        out += ((first + WIDTH + tl.arange(0, REST) < dim)[None, :],)
    return out


@triton.jit
def load(pointers, start, stride, rows, ok, PADDED: tl.constexpr):
    out = ()
    for i in tl.static_range(len(pointers)):
        inside = rows & ok[i] if PADDED else rows
        out += (tl.load(pointers[i] + tl.cast(start, tl.int64) * stride, mask=inside, other=0.0),)
    return out


@triton.jit
def store(pointers, start, stride, value, rows, ok, PADDED: tl.constexpr):
    for i in tl.static_range(len(pointers)):
        inside = rows & ok[i] if PADDED else rows
        place = pointers[i] + tl.cast(start, tl.int64) * stride
        tl.store(place, value[i].to(pointers[i].dtype.element_ty), mask=inside)


@triton.jit
def kept(mask, mask_n, tokens, end):
    """Which of the keys `tokens` take part: (tokens, 1)."""
    keep = tokens < end
    if mask is not None:
        keep = keep & tl.load(mask + tokens.to(tl.int64) * mask_n, mask=keep, other=0).to(tl.int1)
    return keep[:, None]


@triton.jit
def load_row(ptr, batch, heads, head, ok, DIM: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr):
    """Of dense (batch, heads, DIM) those of the tiles' columns: a vector for each piece."""
    start = (batch.to(tl.int64) * heads + head) * DIM
    column = tl.arange(0, G * WIDTH)
    place = start + column // WIDTH * DIM + column % WIDTH
    out = (_row(ptr + place, ok[0]),)
    for i in tl.static_range(1, len(ok)):
        out += (_row(ptr + start + WIDTH + tl.arange(0, ok[i].shape[1]), ok[i]),)
    return out


@triton.jit
def _row(place, ok):
    return tl.load(place, mask=tl.reshape(ok, [ok.shape[1]]), other=0.0).to(tl.float32)


@triton.jit
def zeros(left, right, ROWS: tl.constexpr):
    """A state of nothing, for tiles of keys and of values; (channels, ROWS) for each piece of `left` without those."""
    out = ()
    for i in tl.static_range(len(left)):
        if right is None:
            out += (tl.zeros([left[i].shape[1], ROWS], tl.float32),)
        else:
            for j in tl.static_range(len(right)):
                out += (tl.zeros([left[i].shape[1], right[j].shape[1]], tl.float32),)
    return out


@triton.jit
def no_sums(tile):
    out = ()
    for i in tl.static_range(len(tile)):
        out += (tl.zeros([tile[i].shape[1]], tl.float32),)
    return out


@triton.jit
def add_sums(total, x):
    """total + Σ x over the tokens."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (total[i] + tl.sum(x[i], 0),)
    return out


@triton.jit
def add_products(total, left, right, PRECISION: tl.constexpr):
    """total + leftᵀ · right, for all pairs of pieces."""
    out = ()
    for i in tl.static_range(len(left)):
        turned = tl.trans(left[i])
        for j in tl.static_range(len(right)):
            out += (tl.dot(turned, right[j], total[i * len(right) + j], input_precision=PRECISION),)
    return out


@triton.jit
def add_row(total, x, PRECISION: tl.constexpr):
    """total + Σ x over the tokens, in each of its 16 columns: a product with ones.

    That of float32 in three parts reads outside of memory in Triton 3.6, at two pieces; there the sum is a plain one.
    """
    if PRECISION == "tf32x3":
        out = ()
        for i in tl.static_range(len(x)):
            out += (total[i] + tl.sum(x[i], 0)[:, None],)
    else:
        out = add_products(total, x, (tl.full([x[0].shape[0], 16], 1.0, x[0].dtype),), PRECISION)
    return out


@triton.jit
def times(x, state, PRECISION: tl.constexpr):
    """x · state, of keys' width to values' width."""
    J: tl.constexpr = len(state) // len(x)
    out = ()
    for j in tl.static_range(J):
        total = tl.dot(x[0], state[j], input_precision=PRECISION)
        for i in tl.static_range(1, len(x)):
            total = tl.dot(x[i], state[i * J + j], total, input_precision=PRECISION)
        out += (total,)
    return out


@triton.jit
def times_transposed(x, state, PRECISION: tl.constexpr):
    """x · stateᵀ, of values' width to keys' width."""
    J: tl.constexpr = len(x)
    out = ()
    for i in tl.static_range(len(state) // len(x)):
        total = tl.dot(x[0], tl.trans(state[i * J]), input_precision=PRECISION)
        for j in tl.static_range(1, J):
            total = tl.dot(x[j], tl.trans(state[i * J + j]), total, input_precision=PRECISION)
        out += (total,)
    return out


@triton.jit
def part(ptr, i, j, C: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr):
    """Pointers to the state of piece i of the keys and j of the values; the first pieces are C and V wide."""
    row, column = tl.arange(0, ROWS) + i * C, tl.arange(0, COLUMNS) + j * V
    return ptr + row[:, None] * LINE + column[None, :]
