# mypy: disable-error-code="no-untyped-def"
"""What linear attention's Triton code is built from: tiles of tokens and heads, feature maps, states in memory."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def settled(total):
    """`total`, a sum of matrix products carried through a loop, when the last product is done: nothing but a wait.

    On Hopper a product may read its left operand from registers after the loop has gone on, and Triton 3.6 lets the
    next round write to them (triton-lang/triton#9433). A use in the loop, here one that does nothing, makes it wait.
    """
    if not INTERPRETED:
        total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total


@triton.jit
def head_sums(x, G: tl.constexpr):
    """Sums over the columns of each head: (rows, G·width) to (rows, G)."""
    return tl.sum(x, 1)[:, None] if G == 1 else tl.sum(tl.reshape(x, [x.shape[0], G, x.shape[1] // G]), 2)


@triton.jit
def head_maxima(x, G: tl.constexpr):
    """The largest of each head's columns: (rows, G·width) to (rows, G)."""
    return tl.max(x, 1)[:, None] if G == 1 else tl.max(tl.reshape(x, [x.shape[0], G, x.shape[1] // G]), 2)


@triton.jit
def spread(x, G: tl.constexpr, WIDTH: tl.constexpr):
    """A number per head to each of its columns: (rows, G) to (rows, G·WIDTH), or (rows, 1) which broadcasts."""
    if G > 1:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], [x.shape[0], G, WIDTH]), [x.shape[0], G * WIDTH])
    return x


@triton.jit
def row_sums(f, ok, key_sum, count, constant, eps, CLAMP: tl.constexpr, CONSTANT: tl.constexpr, G: tl.constexpr):
    """What the rows are divided by, (rows, G); one in rows that do not exist."""
    total = head_sums(f * key_sum[None, :], G)
    if CONSTANT:
        total += constant * tl.max(count)
    total = tl.maximum(total, eps) if CLAMP else total + eps
    return tl.where(ok, total, 1.0)


@triton.jit
def feature_map(x, ok, eps, FEATURE: tl.constexpr, G: tl.constexpr):
    """phi(x) in float32; zero where `ok` is not."""
    W: tl.constexpr = x.shape[1] // G
    if FEATURE == "relu":
        f = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif FEATURE == "elu_plus_one":
        f = tl.where(ok, tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0))), 0.0)
    elif FEATURE == "sigmoid":
        f = tl.where(ok, tl.sigmoid(x), 0.0)
    elif FEATURE == "direction":
        f = x / spread(tl.maximum(tl.sqrt(head_sums(x * x, G)), eps), G, W)
    elif FEATURE == "square":
        u = x / spread(tl.sqrt(head_sums(x * x, G)) + eps, G, W)
        f = u * u / spread(tl.sqrt(head_sums(u * u * u * u, G)) + eps, G, W)
    elif FEATURE == "softmax":
        most = spread(head_maxima(tl.where(ok, x, -3e38), G), G, W)
        f = tl.where(ok, tl.exp(x - most), 0.0)
        f = f / spread(tl.maximum(head_sums(f, G), 1e-30, propagate_nan=tl.PropagateNan.ALL), G, W)
    else:
        f = x
    return f


@triton.constexpr_function
def over_tokens(FEATURE):
    """Whether the keys' features are a softmax over tokens, with or without the queries' over channels."""
    return FEATURE == "softmax" or FEATURE == "key_softmax"


@triton.jit
def key_features(k, ok, shift, eps, FEATURE: tl.constexpr, G: tl.constexpr):
    """phi(k); of a softmax over tokens exp(k − shift), still to be divided by its sum over the tokens."""
    return tl.where(ok, tl.exp(k - shift), 0.0) if over_tokens(FEATURE) else feature_map(k, ok, eps, FEATURE, G)


@triton.jit
def load_shift(ptr, batch, heads, head, ok, DIM: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr):
    """Of dense (batch, heads, DIM) those of a tile's columns: (1, G·WIDTH)."""
    column = tl.arange(0, G * WIDTH)
    place = (batch.to(tl.int64) * heads + head) * DIM + column // WIDTH * DIM + column % WIDTH
    return tl.load(ptr + place[None, :], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def averaged(state, key_sum):
    """A state divided by its keys' sums, zero where there are no keys."""
    return state * tl.where(key_sum == 0, 0.0, 1 / key_sum)[:, None]


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
        length = tl.sqrt(head_sums(x * x, G))
        along = tl.where(length > eps, head_sums(f * df, G), 0.0)
        dx = (df - f * spread(along, G, W)) / spread(tl.maximum(length, eps), G, W)
    elif FEATURE == "square":
        length = tl.sqrt(head_sums(x * x, G)) + eps
        u = x / spread(length, G, W)
        length *= tl.sqrt(head_sums(u * u * u * u, G)) + eps
        dx = 2 * u * (df - f * spread(head_sums(f * df, G), G, W)) / spread(length, G, W)
    elif FEATURE == "softmax":
        dx = f * (df - spread(head_sums(f * df, G), G, W))
    else:
        dx = df
    return dx


@triton.jit
def tile(ptr, batch, head, first, stride_b, stride_h, stride_n, stride_d, BLOCK: tl.constexpr, G: tl.constexpr,
         WIDTH: tl.constexpr):  # fmt: skip
    """Pointers to BLOCK tokens of G heads from `head` on, WIDTH channels each from `first` on."""
    column = tl.arange(0, G * WIDTH)
    inner = (first + column % WIDTH) * stride_d
    if G > 1:
        inner += (column // WIDTH).to(tl.int64) * stride_h
    start = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return start + (tl.arange(0, BLOCK)[:, None] * stride_n + inner[None, :])


@triton.jit
def columns(head, heads, first, dim, G: tl.constexpr, WIDTH: tl.constexpr):
    """Which of a tile's columns are channels of a head, not padding: (1, G·WIDTH)."""
    column = tl.arange(0, G * WIDTH)
    return ((head + column // WIDTH < heads) & (first + column % WIDTH < dim))[None, :]


@triton.jit
def load(pointers, start, stride, rows, ok, PADDED: tl.constexpr):
    if PADDED:
        rows = rows & ok
    return tl.load(pointers + tl.cast(start, tl.int64) * stride, mask=rows, other=0.0)


@triton.jit
def store(pointers, start, stride, value, rows, ok, PADDED: tl.constexpr):
    if PADDED:
        rows = rows & ok
    tl.store(pointers + tl.cast(start, tl.int64) * stride, value.to(pointers.dtype.element_ty), mask=rows)


@triton.jit
def kept(mask, mask_n, tokens, end):
    """Which of the keys `tokens` take part: (tokens, 1)."""
    keep = tokens < end
    if mask is not None:
        keep = keep & tl.load(mask + tokens.to(tl.int64) * mask_n, mask=keep, other=0).to(tl.int1)
    return keep[:, None]


@triton.jit
def diagonal(state, G: tl.constexpr):
    """The state with what one head's keys say to another's values dropped."""
    if G > 1:
        of_key = tl.arange(0, state.shape[0]) // (state.shape[0] // G)
        of_value = tl.arange(0, state.shape[1]) // (state.shape[1] // G)
        state = tl.where(of_key[:, None] == of_value[None, :], state, 0.0)
    return state


@triton.jit
def weighted_sum(total, f, weight, G: tl.constexpr, PRECISION: tl.constexpr):
    """total + Σ f·weight over the tokens, by a matrix product: f is (tokens, C), weight (tokens, G), total (C, 16)."""
    P: tl.constexpr = 16 // G if G < 16 else 1
    if G > 2 and f.dtype == tl.float32 and PRECISION == "tf32":  # Triton 3.6 fails to compile this product
        total += tl.sum(f * spread(weight, G, f.shape[1] // G), 0)[:, None]
    else:
        weight = tl.broadcast_to(weight, [weight.shape[0], 16]) if G == 1 else spread(weight, G, P)
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
def save_state(ptr, state, key_sum, value_sum, count):
    """One program's state and sums in a row: C·V, then C, then V, then V numbers."""
    C: tl.constexpr = state.shape[0]
    V: tl.constexpr = state.shape[1]
    c, v = tl.arange(0, C), tl.arange(0, V)
    tl.store(ptr + c[:, None] * V + v[None, :], state)
    tl.store(ptr + C * V + c, key_sum)
    tl.store(ptr + C * V + C + v, value_sum)
    tl.store(ptr + C * V + C + V + v, count)


@triton.jit
def load_state(ptr, C: tl.constexpr, V: tl.constexpr):
    c, v = tl.arange(0, C), tl.arange(0, V)
    state = tl.load(ptr + c[:, None] * V + v[None, :])
    return state, tl.load(ptr + C * V + c), tl.load(ptr + C * V + C + v), tl.load(ptr + C * V + C + V + v)


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
