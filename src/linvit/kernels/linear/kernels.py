# mypy: disable-error-code="no-untyped-def"
"""Linear attention in Triton: two phases forward and two backward, and the kernels that are made of them.

One program serves G heads side by side, so that small heads still read whole memory lines: their features stand in the
columns of one tile, `state = phi(k)ᵀ · v` is one matrix product, and its blocks off the diagonal are dropped.

    keys phase             state, Σ phi(k), Σ v       reads k, v
    queries phase          out                        reads q
    query gradient phase   dq, and the gradients of state and sums   reads q, d out
    key gradient phase     dk, dv                     reads k, v

Each tensor is read or written once in a direction (k once more before a softmax over tokens, for its largest numbers).
All strides are free; token offsets are 64-bit. Programs count value blocks fastest, then groups of heads, then batches;
the grid's second axis is the chunk of tokens. PHASE "both" runs the two phases of a direction in one program: the first
over all tokens, the second over its chunk. PHASE "keys" or "queries" runs one of them over the chunk; the first of the
two leaves partial states, which `add_partials` adds up in fixed order. Backward computes a state again that is not
saved.
"""

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


@triton.jit
def keys_phase(k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, feature_eps,
               FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CONSTANT: tl.constexpr, PADDED: tl.constexpr,
               G: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """state = Σ phi(k)ᵀ · v, key_sum = Σ phi(k), value_sum = Σ v and the number of keys, over tokens begin … end."""
    BLOCK: tl.constexpr = k_tile.shape[0]
    C: tl.constexpr = k_tile.shape[1]
    V: tl.constexpr = v_tile.shape[1]
    state = tl.zeros([C, V], tl.float32)
    key_sums = tl.zeros([C, 16], tl.float32)
    value_sum = tl.zeros([V], tl.float32)
    count = tl.zeros([V], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = kept(mask, mask_n, tokens, end)
        k = load(k_tile, start, k_n, keep, k_ok, PADDED)
        v = load(v_tile, start, v_n, keep, v_ok, PADDED)
        f = tl.trans(key_features(k.to(tl.float32), keep & k_ok, shift, feature_eps, FEATURE, G).to(OPERAND))
        if ROW_SUM or over_tokens(FEATURE):
            key_sums = tl.dot(f, tl.full([BLOCK, 16], 1.0, OPERAND), key_sums, input_precision=PRECISION)
        state = settled(tl.dot(f, v.to(OPERAND), state, input_precision=PRECISION))
        if CONSTANT:
            value_sum += tl.sum(v.to(tl.float32), 0)
            count += tl.sum(keep.to(tl.float32))
    return diagonal(state, G), tl.sum(key_sums, 1) * 0.0625, value_sum, count


@triton.jit
def queries_phase(q_tile, v_tile, out_tile, mask, q_n, v_n, out_n, mask_n, begin, end, q_ok, v_ok,
                  state, key_sum, value_sum, count, constant, scale, eps, feature_eps, own, norm_eps,
                  FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, CONSTANT: tl.constexpr,
                  OWN: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
                  COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """out for the queries begin … end."""
    BLOCK: tl.constexpr = q_tile.shape[0]
    V: tl.constexpr = state.shape[1]
    state = state.to(COMPUTE)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        rows = (tokens < end)[:, None]
        q = load(q_tile, start, q_n, rows, q_ok, PADDED)
        f = feature_map(q.to(tl.float32), rows & q_ok, feature_eps, FEATURE, G)
        out = tl.dot(f.to(COMPUTE), state, input_precision=PRECISION)
        if CONSTANT:
            out += constant * value_sum[None, :]
        if ROW_SUM:
            total = row_sums(f, rows, key_sum, count, constant, eps, CLAMP, CONSTANT, G)
            out *= spread(scale / total, G, V // G)
        else:
            out *= scale
        if OWN:
            keep = kept(mask, mask_n, tokens, end)
            out += own * load(v_tile, start, v_n, keep, v_ok, PADDED).to(tl.float32)
        if NORM:
            out *= spread(1 / tl.maximum(tl.sqrt(head_sums(out * out, G)), norm_eps), G, V // G)
        store(out_tile, start, out_n, out, rows, v_ok, PADDED)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "query_chunk", "key_chunk"])
def forward_kernel(
    q, k, v, out, mask, constant, shift, state,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, out_b, out_h, out_n, out_d, mask_b, mask_n,
    heads, queries, keys, query_chunk, key_chunk, scale, eps, feature_eps, own, norm_eps,
    PHASE: tl.constexpr, FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, OWN: tl.constexpr,
    NORM: tl.constexpr, D: tl.constexpr, VD: tl.constexpr, G: tl.constexpr, DW: tl.constexpr, VW: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, OPERAND: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = G * DW
    V: tl.constexpr = G * VW
    CONSTANT: tl.constexpr = constant is not None
    pid, chunk = tl.program_id(0), tl.program_id(1)
    groups = tl.cdiv(heads, G)
    head = pid // BLOCKS % groups * G
    batch = pid // (BLOCKS * groups)
    first = pid % BLOCKS * VW
    k_ok, v_ok = columns(head, heads, 0, D, G, DW), columns(head, heads, first, VD, G, VW)
    if shift is not None:
        shift = load_shift(shift, batch, heads, head, k_ok, D, G, DW)
    v_tile = tile(v, batch, head, first, v_b, v_h, v_n, v_d, BLOCK, G, VW)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    if state is not None:
        place = pid.to(tl.int64)
        if PHASE == "keys":
            place += chunk * tl.num_programs(0)
        state += place * (C * V + C + 2 * V)

    if PHASE == "queries":
        s, key_sum, value_sum, count = load_state(state, C, V)
    else:
        begin, end = 0, keys
        if PHASE == "keys":
            begin, end = chunk * key_chunk, min(keys, (chunk + 1) * key_chunk)
        k_tile = tile(k, batch, head, 0, k_b, k_h, k_n, k_d, BLOCK, G, DW)
        s, key_sum, value_sum, count = keys_phase(
            k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, feature_eps,
            FEATURE, ROW_SUM, CONSTANT, PADDED, G, OPERAND, PRECISION)  # fmt: skip
        if state is not None and (PHASE == "keys" or chunk == 0):
            save_state(state, s, key_sum, value_sum, count)

    if PHASE != "keys":
        c = 0.0
        if CONSTANT:
            c = tl.load(constant).to(tl.float32)
        if over_tokens(FEATURE):
            s = averaged(s, key_sum)
        q_tile = tile(q, batch, head, 0, q_b, q_h, q_n, q_d, BLOCK, G, DW)
        out_tile = tile(out, batch, head, first, out_b, out_h, out_n, out_d, BLOCK, G, VW)
        begin, end = chunk * query_chunk, min(queries, (chunk + 1) * query_chunk)
        queries_phase(
            q_tile, v_tile, out_tile, mask, q_n, v_n, out_n, mask_n, begin, end, k_ok, v_ok,
            s, key_sum, value_sum, count, c, scale, eps, feature_eps, own, norm_eps,
            FEATURE, ROW_SUM, CLAMP, CONSTANT, OWN, NORM, PADDED, G, COMPUTE, PRECISION)  # fmt: skip


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
