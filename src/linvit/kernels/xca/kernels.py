"""Triton code of cross-covariance attention: two phases forward and two backward, each over all tokens of a head.

    products phase            G = qᵀ · k, Σ q², Σ k²                   reads q, k
    values phase              out = v · Aᵀ                             reads v
    value gradient phase      dv = d out · A,  dA = d outᵀ · v         reads d out, v
    input gradient phase      dq = k · dGᵀ − q·α,  dk = q · dG − k·β   reads q, k

Between them, in registers: S = τ · G / (|q_i| · |k_j|), A = softmax(S) over its rows, and back. PHASE "both" runs the
two phases of a direction in one program over all tokens; "first" leaves the sums of a chunk, which the programs of
"second" add up in order, each again. A head's channels are a tuple of pieces, see tiles.py.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from linvit.kernels import tiles


@triton.jit
def plain(x, UNIT: tl.constexpr):
    return tl.cast(x, tl.int64) * UNIT


@triton.jit
def save(ptr, G, left, right):
    """G line by line, then a number for each line and for each column."""
    J: tl.constexpr = len(right)
    C: tl.constexpr = left[0].shape[0]
    D: tl.constexpr = C if J == 1 else C + left[J - 1].shape[0]
    for i in tl.static_range(J):
        for j in tl.static_range(J):
            piece = G[i * J + j]
            tl.store(tiles.part(ptr, i, j, C, C, piece.shape[0], piece.shape[1], D), piece)
        tl.store(ptr + D * D + i * C + tl.arange(0, left[i].shape[0]), left[i])
        tl.store(ptr + D * D + D + i * C + tl.arange(0, right[i].shape[0]), right[i])


@triton.jit
def load_sums(ptr, parts, step, C: tl.constexpr, CR: tl.constexpr):
    """The sum of what `save` left in `parts` places, `step` apart; pieces are C and CR wide."""
    G, left, right = _load(ptr, C, CR)
    for number in tl.range(1, parts):
        more, more_left, more_right = _load(ptr + tl.cast(number, tl.int64) * step, C, CR)
        G, left, right = tiles.plus(G, more), tiles.plus(left, more_left), tiles.plus(right, more_right)
    return G, left, right


@triton.jit
def _load(ptr, C: tl.constexpr, CR: tl.constexpr):
    D: tl.constexpr = C + CR
    G, left, right = (), (), ()
    for i in tl.static_range(2 if CR else 1):
        for j in tl.static_range(2 if CR else 1):
            G += (tl.load(tiles.part(ptr, i, j, C, C, CR if i else C, CR if j else C, D)),)
        left += (tl.load(ptr + D * D + i * C + tl.arange(0, CR if i else C)),)
        right += (tl.load(ptr + D * D + D + i * C + tl.arange(0, CR if i else C)),)
    return G, left, right


@triton.jit
def squares(total, x):
    """total + x², token by token: sums over tokens wait until the end."""
    out = ()
    for i in tl.static_range(len(x)):
        y = x[i].to(tl.float32)
        out += (total[i] + y * y,)
    return out


@triton.jit
def like(x):
    out = ()
    for i in tl.static_range(len(x)):
        out += (tl.zeros(x[i].shape, tl.float32),)
    return out


@triton.jit
def down(x):
    """Sums over the tokens."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (tl.sum(x[i], 0),)
    return out


@triton.jit
def products_phase(q_tile, k_tile, mask, mask_n, q_n, k_n, begin, end, ok, NORM: tl.constexpr, PADDED: tl.constexpr,
                   OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    BLOCK: tl.constexpr = q_tile[0].shape[0]
    G, of_q, of_k = tiles.zeros(q_tile, k_tile, 0), like(q_tile), like(k_tile)
    for start in tl.range(begin, end, BLOCK):
        keep = tiles.kept(mask, mask_n, start + tl.arange(0, BLOCK), end)
        q = tiles.load(q_tile, start, q_n, keep, ok, PADDED)
        k = tiles.load(k_tile, start, k_n, keep, ok, PADDED)
        if NORM:
            of_q, of_k = squares(of_q, q), squares(of_k, k)
        G = tiles.add_products(G, tiles.as_type(q, OPERAND), tiles.as_type(k, OPERAND), PRECISION)
    return G, down(of_q), down(of_k)


@triton.jit
def inverse_lengths(x, eps, NORM: tl.constexpr):
    """Of each channel over the tokens; 1 where nothing is normalised."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (1 / tl.maximum(tl.sqrt(x[i]), eps) if NORM else x[i] * 0.0 + 1.0,)
    return out


@triton.jit
def between(G, left, right, scale):
    """scale · G, its lines times `left` and its columns times `right`."""
    J: tl.constexpr = len(right)
    out = ()
    for i in tl.static_range(len(left)):
        for j in tl.static_range(J):
            out += (G[i * J + j] * (left[i] * scale)[:, None] * right[j][None, :],)
    return out


@triton.jit
def softmax(S, ok):
    """Over the lines' columns that are channels."""
    J: tl.constexpr = len(ok)
    out = ()
    for i in tl.static_range(len(S) // J):
        top = tl.max(tl.where(ok[0], S[i * J], float("-inf")), 1)
        for j in tl.static_range(1, J):
            top = tl.maximum(top, tl.max(tl.where(ok[j], S[i * J + j], float("-inf")), 1))
        line = ()
        total = tl.zeros_like(top)
        for j in tl.static_range(J):
            weight = tl.where(ok[j], tl.exp(S[i * J + j] - top[:, None]), 0.0)
            total += tl.sum(weight, 1)
            line += (weight,)
        for j in tl.static_range(J):
            out += (line[j] / total[:, None],)
    return out


@triton.jit
def line_sums(x, y, J: tl.constexpr):
    """Sums of x·y over columns, for each piece of lines."""
    out = ()
    for i in tl.static_range(len(x) // J):
        total = tl.sum(x[i * J] * y[i * J], 1)
        for j in tl.static_range(1, J):
            total += tl.sum(x[i * J + j] * y[i * J + j], 1)
        out += (total,)
    return out


@triton.jit
def column_sums(x, y, J: tl.constexpr):
    out = ()
    for j in tl.static_range(J):
        total = tl.sum(x[j] * y[j], 0)
        for i in tl.static_range(1, len(x) // J):
            total += tl.sum(x[i * J + j] * y[i * J + j], 0)
        out += (total,)
    return out


@triton.jit
def through_softmax(A, dA, J: tl.constexpr):
    """dS = A · (dA − Σ A·dA), the sum over a line."""
    along = line_sums(A, dA, J)
    out = ()
    for i in tl.static_range(len(along)):
        for j in tl.static_range(J):
            out += (A[i * J + j] * (dA[i * J + j] - along[i][:, None]),)
    return out


@triton.jit
def shares(sums, square, inverse, eps, NORM: tl.constexpr):
    """What each channel's own length takes from its gradient; none where it is eps that divides."""
    out = ()
    for i in tl.static_range(len(sums)):
        one = tl.where(tl.sqrt(square[i]) > eps, sums[i] * inverse[i] * inverse[i], 0.0) if NORM else sums[i] * 0.0
        out += (one[None, :],)
    return out


@triton.jit
def less(x, y, factor):
    """x − y · factor."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (x[i] - y[i].to(tl.float32) * factor[i],)
    return out


@triton.jit
def place(heads):
    return tl.program_id(0) // heads, tl.program_id(0) % heads


@triton.jit
def scale_of(temperature, counts, scale, batch, head):
    """τ, or one over the root of the number of tokens."""
    if temperature is not None:
        scale = tl.load(temperature + head).to(tl.float32)
    if counts is not None:
        scale = tl.rsqrt(tl.load(counts + batch))
    return scale


@triton.jit
def forward_kernel(
    q, k, v, out, mask, temperature, counts, partial, state, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    o_b, o_h, o_n, mask_b, mask_n, heads, tokens, chunk, parts, step, scale, eps,
    D: tl.constexpr, C: tl.constexpr, CR: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr,
    PHASE: tl.constexpr, OPERAND: tl.constexpr, WEIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out of one head, or one phase of it over a chunk of tokens; the sums go to `state` where backward needs them."""
    batch, head = place(heads)
    zero = tl.zeros([], tl.int32)
    PADDED: tl.constexpr = D != C + CR
    ok = tiles.columns(head, heads, zero, D, 1, C, CR)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, tokens)
    numbers = tl.program_id(0).to(tl.int64) * ((C + CR) * (C + CR + 2))
    q_n, k_n, v_n, o_n = q_n * UNIT, k_n * UNIT, v_n * UNIT, o_n * UNIT
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    if PHASE != "second":
        q_tile = tiles.tiles(q, batch, head, zero, plain(q_b, UNIT), plain(q_h, UNIT), q_n, q_d, BLOCK, 1, C, CR)
        k_tile = tiles.tiles(k, batch, head, zero, plain(k_b, UNIT), plain(k_h, UNIT), k_n, k_d, BLOCK, 1, C, CR)
        G, of_q, of_k = products_phase(
            q_tile, k_tile, mask, mask_n, q_n, k_n, begin, end, ok, NORM, PADDED, OPERAND, PRECISION
        )
        if PHASE == "first":
            save(partial + tl.program_id(1).to(tl.int64) * step + numbers, G, of_q, of_k)
    else:
        G, of_q, of_k = load_sums(partial + numbers, parts, step, C, CR)
    if PHASE != "first":
        if state is not None and tl.program_id(1) == 0:
            save(state + numbers, G, of_q, of_k)
        scale = scale_of(temperature, counts, scale, batch, head)
        S = between(G, inverse_lengths(of_q, eps, NORM), inverse_lengths(of_k, eps, NORM), scale)
        A = tiles.as_type(softmax(S, ok), WEIGHT)
        v_tile = tiles.tiles(v, batch, head, zero, plain(v_b, UNIT), plain(v_h, UNIT), v_n, v_d, BLOCK, 1, C, CR)
        out_tile = tiles.tiles(out, batch, head, zero, plain(o_b, UNIT), plain(o_h, UNIT), o_n, 1, BLOCK, 1, C, CR)
        for start in tl.range(begin, end, BLOCK):
            there = (start + tl.arange(0, BLOCK) < end)[:, None]
            x = tiles.as_type(tiles.load(v_tile, start, v_n, there, ok, PADDED), WEIGHT)
            tiles.store(out_tile, start, o_n, tiles.times_transposed(x, A, PRECISION), there, ok, PADDED)


@triton.jit
def backward_kernel(
    q, k, v, g, dq, dk, dv, mask, temperature, counts, partial, state, d_temperature, q_b, q_h, q_n, q_d, k_b, k_h, k_n,
    k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_n,
    heads, tokens, chunk, parts, step, scale, eps,
    D: tl.constexpr, C: tl.constexpr, CR: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr,
    PHASE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of one head, and its share of the temperature's gradient; or one phase over a chunk of tokens."""
    batch, head = place(heads)
    zero = tl.zeros([], tl.int32)
    PADDED: tl.constexpr = D != C + CR
    J: tl.constexpr = 2 if CR else 1
    ok = tiles.columns(head, heads, zero, D, 1, C, CR)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, tokens)
    numbers = tl.program_id(0).to(tl.int64) * ((C + CR) * (C + CR + 2))
    q_n, k_n, v_n, g_n = q_n * UNIT, k_n * UNIT, v_n * UNIT, g_n * UNIT
    dq_n, dk_n, dv_n = dq_n * UNIT, dk_n * UNIT, dv_n * UNIT
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    scale = scale_of(temperature, counts, scale, batch, head)
    G, of_q, of_k = _load(state + numbers, C, CR)
    left, right = inverse_lengths(of_q, eps, NORM), inverse_lengths(of_k, eps, NORM)
    A = softmax(between(G, left, right, scale), ok)
    if PHASE != "second":
        v_tile = tiles.tiles(v, batch, head, zero, plain(v_b, UNIT), plain(v_h, UNIT), v_n, v_d, BLOCK, 1, C, CR)
        g_tile = tiles.tiles(g, batch, head, zero, plain(g_b, UNIT), plain(g_h, UNIT), g_n, g_d, BLOCK, 1, C, CR)
        dv_tile = tiles.tiles(dv, batch, head, zero, plain(dv_b, UNIT), plain(dv_h, UNIT), dv_n, 1, BLOCK, 1, C, CR)
        weight = tiles.as_type(A, OPERAND)
        dA = tiles.zeros(g_tile, v_tile, 0)
        for start in tl.range(begin, end, BLOCK):
            there = (start + tl.arange(0, BLOCK) < end)[:, None]
            grad = tiles.as_type(tiles.load(g_tile, start, g_n, there, ok, PADDED), OPERAND)
            x = tiles.as_type(tiles.load(v_tile, start, v_n, there, ok, PADDED), OPERAND)
            dA = tiles.add_products(dA, grad, x, PRECISION)
            tiles.store(dv_tile, start, dv_n, tiles.times(grad, weight, PRECISION), there, ok, PADDED)
        if PHASE == "first":
            save(partial + tl.program_id(1).to(tl.int64) * step + numbers, dA, of_q, of_k)
    else:
        dA, _, _ = load_sums(partial + numbers, parts, step, C, CR)
    if PHASE != "first":
        S = between(G, left, right, 1.0)
        dS = through_softmax(A, dA, J)
        along, across = line_sums(dS, S, J), column_sums(dS, S, J)
        if d_temperature is not None and tl.program_id(1) == 0:
            total = tl.sum(along[0], 0)
            for i in tl.static_range(1, len(along)):
                total += tl.sum(along[i], 0)
            tl.store(d_temperature + tl.program_id(0), total)
        alpha = tiles.each_times(shares(along, of_q, left, eps, NORM), scale)
        beta = tiles.each_times(shares(across, of_k, right, eps, NORM), scale)
        dG = tiles.as_type(between(dS, left, right, scale), OPERAND)
        q_tile = tiles.tiles(q, batch, head, zero, plain(q_b, UNIT), plain(q_h, UNIT), q_n, q_d, BLOCK, 1, C, CR)
        k_tile = tiles.tiles(k, batch, head, zero, plain(k_b, UNIT), plain(k_h, UNIT), k_n, k_d, BLOCK, 1, C, CR)
        dq_tile = tiles.tiles(dq, batch, head, zero, plain(dq_b, UNIT), plain(dq_h, UNIT), dq_n, 1, BLOCK, 1, C, CR)
        dk_tile = tiles.tiles(dk, batch, head, zero, plain(dk_b, UNIT), plain(dk_h, UNIT), dk_n, 1, BLOCK, 1, C, CR)
        for start in tl.range(begin, end, BLOCK):
            tokens_here = start + tl.arange(0, BLOCK)
            keep = tiles.kept(mask, mask_n, tokens_here, end)
            there = (tokens_here < end)[:, None]
            x = tiles.load(q_tile, start, q_n, keep, ok, PADDED)
            y = tiles.load(k_tile, start, k_n, keep, ok, PADDED)
            to_q = tiles.times_transposed(tiles.as_type(y, OPERAND), dG, PRECISION)
            to_k = tiles.times(tiles.as_type(x, OPERAND), dG, PRECISION)
            tiles.store(dq_tile, start, dq_n, less(to_q, x, alpha), there, ok, PADDED)
            tiles.store(dk_tile, start, dk_n, less(to_k, y, beta), there, ok, PADDED)
