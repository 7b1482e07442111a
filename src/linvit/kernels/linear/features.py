# mypy: disable-error-code="no-untyped-def, assignment"
"""The feature maps of the kernels, their gradients, and the rotary position that turns features; pieces as in tiles.py.

A turned feature is `f·cos + partner·sin`: pairs of channels are neighbours ("pairs"), or i and i + head_dim/2
("halves"). One cosine and one sine serve a pair. Tokens before the first that has a position stay as they are.
"""

import triton
import triton.language as tl

from linvit.kernels import tiles

LEAST = tl.constexpr(1e-30)  # length of the squares of a token that is zero


@triton.jit
def exp(x, less):
    """e to the x − less, in two instructions: what is less than float32's smallest normal number is zero."""
    if tiles.INTERPRETED:
        x = tl.exp(x - less)
    else:
        power = x * 1.4426950408889634 - less * 1.4426950408889634
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1
        )
    return x


@triton.jit
def feature_map(x, rows, ok, eps, FEATURE: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr):
    """phi(x) in float32; zero in columns that are not `ok`, and in rows that are not, where they are given.

    Without those, rows that do not exist are those of zeros.
    """
    if FEATURE == "direction":
        f = tiles.scaled(x, 1 / tl.maximum(tl.sqrt(tiles.head_sums(x, x, G)), eps), G)
    elif FEATURE == "square":
        squares = _squares(x)
        f = tiles.scaled(squares, inverse_length(squares, LEAST, G), G)
    elif FEATURE == "softmax":
        f = _softmax(x, ok, PADDED, G)
    else:
        f = ()
        for i in tl.static_range(len(x)):
            f += (_elementwise(x[i], rows, ok[i], FEATURE, PADDED),)
    return f


@triton.jit
def _elementwise(x, rows, ok, FEATURE: tl.constexpr, PADDED: tl.constexpr):
    if FEATURE == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif FEATURE == "elu_plus_one":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + exp(tl.minimum(x, 0.0), 0.0)
        x = _held(x, rows, ok, PADDED)
    elif FEATURE == "sigmoid":
        x = _held(1 / (1 + exp(-x, 0.0)), rows, ok, PADDED)
    return x


@triton.jit
def _held(x, rows, ok, PADDED: tl.constexpr):
    """Zero in other rows, if there are any, and in columns that are padding."""
    if PADDED:
        x = tl.where(ok, x, 0.0)
    if rows is not None:
        x = tl.where(rows, x, 0.0)
    return x


@triton.jit
def inverse_length(x, eps, G: tl.constexpr):
    return 1 / (tl.sqrt(tiles.head_sums(x, x, G)) + eps)


@triton.jit
def _squares(x):
    """x², whose own squares stay within float32. The reference divides x by its length first, which cancels as long as
    eps is small: that reduction over a row is what few tokens would wait for."""
    out = ()
    for i in tl.static_range(len(x)):
        held = tl.minimum(tl.maximum(x[i], -1e9, tl.PropagateNan.ALL), 1e9, tl.PropagateNan.ALL)
        out += (held * held,)
    return out


@triton.jit
def products(x, y):
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i] * y[i],)
    return out


@triton.jit
def _softmax(x, ok, PADDED: tl.constexpr, G: tl.constexpr):
    """Over the channels of a head."""
    held = ()
    for i in tl.static_range(len(x)):
        held += (tl.where(ok[i], x[i], -3e38) if PADDED else x[i],)
    most = tiles.head_maxima(held, G)
    f, ones = (), ()
    for i in tl.static_range(len(x)):
        f += (_held(exp(x[i], tiles.spread(most, G, x[i].shape[1] // G)), None, ok[i], PADDED),)
        ones += (1.0,)
    total = tl.maximum(tiles.head_sums(f, ones, G), 1e-30, propagate_nan=tl.PropagateNan.ALL)
    return tiles.scaled(f, 1 / total, G)


@triton.constexpr_function
def over_tokens(FEATURE):
    """Whether the keys' features are a softmax over tokens, with or without the queries' over channels."""
    return FEATURE == "softmax" or FEATURE == "key_softmax"


@triton.jit
def nothing_yet(k_tiles):
    """The largest keys before any: a vector for each piece."""
    out = ()
    for i in tl.static_range(len(k_tiles)):
        out += (tl.full([k_tiles[i].shape[1]], -2e38, tl.float32),)
    return out


@triton.jit
def larger(most, k, keep):
    """The largest of each channel, with those of more keys."""
    out = ()
    for i in tl.static_range(len(k)):
        out += (tl.maximum(most[i], tl.max(tl.where(keep, k[i], -2e38), 0)),)
    return out


@triton.jit
def rescaled(total, before, now):
    """Sums of exponentials less another maximum; `total` has rows of channels, pieces as in a state."""
    J: tl.constexpr = len(total) // len(now)
    out = ()
    for i in tl.static_range(len(now)):
        factor = exp(before[i], now[i])[:, None]
        for j in tl.static_range(J):
            out += (total[i * J + j] * factor,)
    return out


@triton.constexpr_function
def range_of(OPERAND):
    """How far exponents may be above what was subtracted: e to that is within the type that products are made of."""
    return {tl.float16: 10.0}.get(OPERAND, 60.0)


@triton.jit
def first_shift(k, keep):
    """What to subtract from exponents, by the first keys: the largest of each channel, zero where there is none."""
    out = ()
    for i in tl.static_range(len(k)):
        most = tl.max(tl.where(keep, k[i], -2e38), 0)
        out += (tl.where(most < -1e38, 0.0, most),)
    return out


@triton.jit
def held(k, shift, OPERAND: tl.constexpr):
    """Keys, as far above `shift` as exponents may be."""
    out = ()
    for i in tl.static_range(len(k)):
        most = shift[i][None, :] + range_of(OPERAND)
        out += (tl.minimum(k[i], most, propagate_nan=tl.PropagateNan.ALL),)
    return out


@triton.jit
def out_of_range(key_sums, ok, OPERAND: tl.constexpr):
    """Whether exponentials were not in range: one that `held` changed would make its sum as large as this, and of a
    channel that has its own largest key in the first tile one is 1."""
    most = tl.exp(range_of(OPERAND) - 1.0)
    out = 0
    for i in tl.static_range(len(key_sums)):
        there = tl.reshape(ok[i], [key_sums[i].shape[0], 1])
        wrong = (key_sums[i] > most) | (there & (key_sums[i] < 0.5))
        out = tl.maximum(out, tl.max(tl.max(wrong.to(tl.int32), 1), 0))
    return out > 0


@triton.jit
def key_features(k, keep, ok, shift, eps, FEATURE: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr):
    """phi(k); of a softmax over tokens exp(k − shift), still to be divided by its sum over the tokens."""
    if over_tokens(FEATURE):
        f = ()
        for i in tl.static_range(len(k)):
            f += (_held(exp(k[i], shift[i][None, :]), keep, ok[i], PADDED),)
    else:
        f = feature_map(k, keep, ok, eps, FEATURE, PADDED, G)
    return f


@triton.jit
def row_sums(f, ok, key_sum, count, constant, eps, CLAMP: tl.constexpr, CONSTANT: tl.constexpr, G: tl.constexpr):
    """What the rows are divided by, (rows, G); one in rows that do not exist."""
    total = tiles.head_sums(f, tiles.multiples(key_sum, 1.0), G)
    if CONSTANT:
        total += constant * tl.max(count)
    total = tl.maximum(total, eps) if CLAMP else total + eps
    return tl.where(ok, total, 1.0)


@triton.jit
def feature_gradient(x, f, df, eps, FEATURE: tl.constexpr, G: tl.constexpr):
    """dx from phi(x) and its gradient."""
    if FEATURE == "direction":
        length = tl.sqrt(tiles.head_sums(x, x, G))
        along = tl.where(length > eps, tiles.head_sums(f, df, G), 0.0)
        dx = tiles.scaled(tiles.plus(df, tiles.scaled(f, -along, G)), 1 / tl.maximum(length, eps), G)
    elif FEATURE == "square":
        inverse = 2 * inverse_length(_squares(x), LEAST, G)
        across = tiles.plus(df, tiles.scaled(f, -tiles.head_sums(f, df, G), G))
        dx = tiles.scaled(products(x, across), inverse, G)
    elif FEATURE == "softmax":
        dx = products(f, tiles.plus(df, _minus(tiles.head_sums(f, df, G), f, G)))
    else:
        dx = ()
        for i in tl.static_range(len(x)):
            dx += (_elementwise_gradient(f[i], df[i], FEATURE),)
    return dx


@triton.jit
def _minus(x, like, G: tl.constexpr):
    """−x, (rows, G), for the columns of each piece."""
    out = ()
    for i in tl.static_range(len(like)):
        out += (-tiles.spread(x, G, like[i].shape[1] // G),)
    return out


@triton.jit
def _elementwise_gradient(f, df, FEATURE: tl.constexpr):
    if FEATURE == "relu":
        df = tl.where(f > 0, df, 0.0)
    elif FEATURE == "elu_plus_one":
        df = df * tl.minimum(f, 1.0)
    elif FEATURE == "sigmoid":
        df = df * f * (1 - f)
    return df


@triton.jit
def turns(ptr, batch, head, heads, stride_b, stride_h, stride_n, stride_d, prefix, TURN: tl.constexpr,
          D: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr):  # fmt: skip
    """Where the cosines or sines of the pairs stand: pointers and columns, the tokens' stride, the first's number."""
    if TURN == "":
        found = None
    else:
        pointers = tiles.tiles(ptr, batch, head, 0, stride_b, stride_h, stride_n, stride_d, BLOCK, G, DW // 2, DR // 2)
        found = (pointers, tiles.columns(head, heads, 0, D // 2, G, DW // 2, DR // 2), stride_n, prefix)
    return found


@triton.jit
def angles(turn, start, tokens, end, OTHER: tl.constexpr):
    """Cosines (OTHER is 1) or sines (0) of the pairs of each piece, from `turn`: pointers, columns, stride, prefix."""
    pointers, ok, stride, prefix = turn
    rows = ((tokens >= prefix) & (tokens < end))[:, None]
    out = ()
    for i in tl.static_range(len(pointers)):
        place = pointers[i] + (tl.cast(start, tl.int64) - prefix) * stride
        out += (tl.load(place, mask=rows & ok[i], other=OTHER).to(tl.float32),)
    return out


@triton.jit
def turned(f, cos, sin, TURN: tl.constexpr, G: tl.constexpr):
    """Features turned by their angles, of which there is a column for each pair; by those of the other sign, back."""
    out = ()
    for i in tl.static_range(len(f)):
        out += (_turned(f[i], cos[i], sin[i], TURN, G),)
    return out


@triton.jit
def _turned(f, cos, sin, TURN: tl.constexpr, G: tl.constexpr):
    BLOCK: tl.constexpr = f.shape[0]
    C: tl.constexpr = f.shape[1]
    HALF: tl.constexpr = C // G // 2
    if TURN == "halves":
        f = tl.reshape(tl.permute(tl.reshape(f, [BLOCK, G, 2, HALF]), [0, 1, 3, 2]), [BLOCK, C // 2, 2])
    else:
        f = tl.reshape(f, [BLOCK, C // 2, 2])
    one, other = tl.split(f)
    f = tl.join(one * cos - other * sin, other * cos + one * sin)
    if TURN == "halves":
        f = tl.permute(tl.reshape(f, [BLOCK, G, HALF, 2]), [0, 1, 3, 2])
    return tl.reshape(f, [BLOCK, C])


@triton.jit
def back(sin):
    """Sines of the opposite angles."""
    out = ()
    for i in tl.static_range(len(sin)):
        out += (-sin[i],)
    return out
