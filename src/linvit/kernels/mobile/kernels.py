"""Triton code of Mobile-Attention's flows and keys: many heads of a few channels each, which compete at every token.

What couples the heads of a token is four small vectors,

    flow = Σ phi(k) + eps,  Σ phi(q) + eps,  Σ phi(k)/O + eps,  Σ phi(q)/I + eps      sums over heads

which are written once; with them I, O, Ī and Ō of a head are dot products of its own channels, and the other kernels
can split the heads among programs. Only the last step of the backward pass needs all heads of a token again. Where a
token's channels are few, flows and keys are one launch instead: sources.py.

Heads this small leave nothing for a matrix unit each, but a group of them does where sums run over tokens: the products
are those of all channels with all values, with the heads' states on the diagonal. The rest is elementwise on tiles of
(tokens, heads, channels) in float32, and what counts is instructions.
"""
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from linvit.kernels.approximate import exp, inverse, rough, sigmoid
from linvit.kernels.tiles import settled, strides

CALM = tl.constexpr(60.0)  # Ō up to which exp needs no maximum subtracted


@triton.jit
def rows(ptr, batch, tokens, ok, stride_b, stride_h, stride_n, stride_d, first, channels,
         D: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Tokens × COLUMNS channels from `first` on, zero where there is nothing; D is 0 where heads lie side by side."""
    channel = first + tl.arange(0, COLUMNS)
    inner = channel * stride_d if D == 0 else (channel // D) * stride_h + (channel % D) * stride_d
    at = ptr + batch.to(tl.int64) * stride_b + tokens.to(tl.int64)[:, None] * stride_n
    return tl.load(at + inner[None, :], mask=ok[:, None] & (channel < channels)[None, :], other=0.0)


@triton.jit
def tile(ptr, batch, tokens, ok, stride_b, stride_h, stride_n, stride_d, first, channels,
         D: tl.constexpr, M: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """The same in float32 as tokens × M small heads × W channels."""
    x = rows(ptr, batch, tokens, ok, stride_b, stride_h, stride_n, stride_d, first, channels, D, M * W)
    return tl.reshape(x.to(tl.float32), [tokens.shape[0], M, W])


@triton.jit
def put(ptr, batch, tokens, ok, stride_b, stride_n, first, channels, x):
    """The inverse, tokens × columns into dense channels."""
    channel = first + tl.arange(0, x.shape[1])
    at = ptr + batch.to(tl.int64) * stride_b + tokens.to(tl.int64)[:, None] * stride_n
    tl.store(at + channel[None, :], x.to(ptr.dtype.element_ty), mask=ok[:, None] & (channel < channels)[None, :])


@triton.jit
def phi(x, first, heads, W: tl.constexpr, ROUGH: tl.constexpr):
    """Sigmoid; zero for heads that only fill the tile."""
    head = first // W + tl.arange(0, x.shape[1])
    return tl.where((head < heads)[None, :, None], sigmoid(x, ROUGH), 0.0)


@triton.jit
def one_of(x, NUMBER: tl.constexpr):
    """One number of the last axis, which stays: x is where it was in registers."""
    if x.shape[2] == 1:
        return x
    elif x.shape[2] == 2:
        return tl.split(x)[NUMBER][:, :, None]
    else:
        return tl.sum(tl.where((tl.arange(0, x.shape[2]) == NUMBER)[None, None, :], x, 0.0), 2)[:, :, None]


@triton.jit
def flow_of(flow, batch, tokens, ok, count, WHICH: tl.constexpr, W: tl.constexpr):
    """One of the four vectors of each token, (tokens, 1, W)."""
    at = flow + ((batch.to(tl.int64) * count + tokens)[:, None] * 4 + WHICH) * W + tl.arange(0, W)[None, :]
    return tl.load(at, mask=ok[:, None], other=1.0)[:, None, :]


@triton.jit
def features(ptr, batch, tokens, ok, stride_b, stride_h, stride_n, stride_d, channels, D: tl.constexpr,
             W: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """phi of all channels of a token: a tuple of pieces WIDE each, and the rest."""
    ROUGH: tl.constexpr = rough(ptr.dtype.element_ty)
    out = ()
    for i in tl.static_range(PIECES):
        x = tile(ptr, batch, tokens, ok, stride_b, stride_h, stride_n, stride_d, i * WIDE, channels, D, WIDE // W, W)
        out += (phi(x, i * WIDE, channels // W, W, ROUGH),)
    if REST:
        first = PIECES * WIDE
        x = tile(ptr, batch, tokens, ok, stride_b, stride_h, stride_n, stride_d, first, channels, D, REST // W, W)
        out += (phi(x, first, channels // W, W, ROUGH),)
    return out


@triton.jit
def over_heads(x):
    """Sums over all heads of a token, (tokens, 1, W); pieces of one width are added first."""
    total = x[0]
    for i in tl.static_range(1, len(x)):
        if x[i].shape[1] == x[0].shape[1]:
            total += x[i]
    out = tl.sum(total, 1)
    if x[len(x) - 1].shape[1] != x[0].shape[1]:
        out += tl.sum(x[len(x) - 1], 1)
    return out[:, None, :]


@triton.jit
def put_flows(flow, a, c, batch, tokens, ok, tokens_all, eps):
    """Write the four vectors of tokens whose features are a and c, and return the last."""
    W: tl.constexpr = a[0].shape[2]
    of_k, of_q = over_heads(c) + eps, over_heads(a) + eps
    least_in, least_out = eps * tl.sum(of_k, 2), eps * tl.sum(of_q, 2)
    by_out, by_in = (), ()
    for i in tl.static_range(len(a)):
        incoming = tl.sum(a[i] * of_k, 2) + least_in
        outgoing = tl.sum(c[i] * of_q, 2) + least_out
        both = inverse(incoming * outgoing)  # one division for the two
        by_out += (c[i] * (both * incoming)[:, :, None],)
        by_in += (a[i] * (both * outgoing)[:, :, None],)
    outs, ins = over_heads(by_out) + eps, over_heads(by_in) + eps
    at = flow + (batch.to(tl.int64) * tokens_all + tokens)[:, None, None] * (4 * W) + tl.arange(0, W)[None, None, :]
    ok = ok[:, None, None]
    tl.store(at, of_k, mask=ok)
    tl.store(at + W, of_q, mask=ok)
    tl.store(at + 2 * W, outs, mask=ok)
    tl.store(at + 3 * W, ins, mask=ok)
    return ins


@triton.jit
def flows_kernel(q, k, flow, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, channels, tokens_all, eps,
                 QD: tl.constexpr, KD: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
                 REST: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """The four vectors of BLOCK tokens."""
    blocks = tl.cdiv(tokens_all, BLOCK)
    batch = tl.program_id(0) // blocks
    tokens = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    ok = tokens < tokens_all
    q_b, q_h, q_n = strides(q_b, q_h, q_n, UNIT)
    k_b, k_h, k_n = strides(k_b, k_h, k_n, UNIT)
    a = features(q, batch, tokens, ok, q_b, q_h, q_n, q_d, channels, QD, W, WIDE, PIECES, REST)
    c = features(k, batch, tokens, ok, k_b, k_h, k_n, k_d, channels, KD, W, WIDE, PIECES, REST)
    put_flows(flow, a, c, batch, tokens, ok, tokens_all, eps)


@triton.jit
def state_at(ptr, first, heads, W: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
    """Pointers to the state (M, W, V) and the sums (M, W) of the heads from channel `first` on, and which are there."""
    head = first // W + tl.arange(0, M)
    i, j = tl.arange(0, W), tl.arange(0, V)
    state = ptr + (head[:, None, None] * W + i[None, :, None]) * V + j[None, None, :]
    sums = ptr + heads * W * V + head[:, None] * W + i[None, :]
    return state, sums, head < heads


@triton.jit
def on_diagonal(x, W: tl.constexpr, V: tl.constexpr):
    """Where a product of all channels of a group with all its values is one of a head with itself."""
    return (tl.arange(0, x.shape[0]) // W)[:, None] == (tl.arange(0, x.shape[1]) // V)[None, :]


@triton.jit
def put_state(ptr, first, channels, x, W: tl.constexpr, V: tl.constexpr):
    """Write the diagonal of a group's products to where the heads' states are."""
    row, column = first + tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    at = ptr + row[:, None] * V + (column % V)[None, :]
    tl.store(at, x, mask=on_diagonal(x, W, V) & (row < channels)[:, None])


@triton.jit
def spread(state):
    """States (M, W, V) on the diagonal of a matrix (M·W, M·V)."""
    M: tl.constexpr = state.shape[0]
    W: tl.constexpr = state.shape[1]
    V: tl.constexpr = state.shape[2]
    x = tl.broadcast_to(tl.reshape(state, [M * W, 1, V]), [M * W, M, V])
    x = tl.reshape(x, [M * W, M * V])
    return tl.where(on_diagonal(x, W, V), x, 0.0)


@triton.jit
def competing(k, flow, batch, tokens, keep, tokens_all, k_b, k_h, k_n, k_d, first, channels, eps, D: tl.constexpr,
              M: tl.constexpr, W: tl.constexpr, CLAMP: tl.constexpr):  # fmt: skip
    """phi(k), zero where no key is, and Ō."""
    x = tile(k, batch, tokens, keep, k_b, k_h, k_n, k_d, first, channels, D, M, W)
    c = phi(x, first, channels // W, W, rough(k.dtype.element_ty))
    by_in = flow_of(flow, batch, tokens, keep, tokens_all, 3, W)
    flowing = tl.sum(c * by_in, 2) + eps * tl.sum(by_in, 2)
    if CLAMP:
        flowing = tl.minimum(tl.maximum(flowing, -1.0), 1.0)
    return tl.where(keep[:, None, None], c, 0.0), flowing


@triton.jit
def kept(mask, batch, tokens, end, mask_b, mask_n):
    """Which tokens take part as keys."""
    keep = tokens < end
    if mask is not None:
        at = mask + batch.to(tl.int64) * mask_b + tokens.to(tl.int64) * mask_n
        keep = keep & tl.load(at, mask=keep, other=0).to(tl.int1)
    return keep


@triton.jit
def keys_kernel(k, v, flow, mask, partial, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, mask_b, mask_n,
                channels, value_channels, batches, tokens_all, chunk, size, eps,
                KD: tl.constexpr, VD: tl.constexpr, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
                BLOCK: tl.constexpr, UNIT: tl.constexpr, CLAMP: tl.constexpr, KIND: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """State, sums and softmax of M heads over one chunk of tokens; a total and a level of the softmax for each head."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    heads = channels // W
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    k_b, k_h, k_n = strides(k_b, k_h, k_n, UNIT)
    v_b, v_h, v_n = strides(v_b, v_h, v_n, UNIT)
    top = tl.zeros([M], tl.float32)
    if not CLAMP:
        # Ō is at least 0 and at most the sum of by_in, about 2 unless a few heads take all: then maxima are needed.
        most = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(begin, end, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            by_in = flow_of(flow, batch, tokens, tokens < end, tokens_all, 3, W)
            most = tl.maximum(most, tl.sum(tl.sum(by_in, 2), 1))
        if tl.max(most, 0) > CALM:
            for start in tl.range(begin, end, BLOCK):
                tokens = start + tl.arange(0, BLOCK)
                keep = kept(mask, batch, tokens, end, mask_b, mask_n)
                _, flowing = competing(
                    k, flow, batch, tokens, keep, tokens_all, k_b, k_h, k_n, k_d, first, channels, eps, KD, M, W, CLAMP
                )
                top = tl.maximum(top, tl.max(tl.where(keep[:, None], flowing, 0.0), 0))
    state = tl.zeros([M * W, M * V], tl.float32)
    sums = tl.zeros([BLOCK, M, W], tl.float32)
    total = tl.zeros([BLOCK, M], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = kept(mask, batch, tokens, end, mask_b, mask_n)
        x = rows(v, batch, tokens, keep, v_b, v_h, v_n, v_d, first // W * V, value_channels, VD, M * V)
        c, flowing = competing(
            k, flow, batch, tokens, keep, tokens_all, k_b, k_h, k_n, k_d, first, channels, eps, KD, M, W, CLAMP
        )
        weight = tl.where(keep[:, None], exp(flowing - top[None, :]), 0.0)
        total += weight
        sums += c
        weighed = tl.reshape(c * weight[:, :, None], [BLOCK, M * W]).to(KIND)
        state = settled((tl.dot(tl.trans(weighed), x.to(KIND), state, input_precision=PRECISION),))[0]
    at = partial + (tl.program_id(1) * batches + batch).to(tl.int64) * size
    put_state(at, first, channels, state, W, V)
    _, sums_ptr, there = state_at(at, first, heads, W, V, M)
    tl.store(sums_ptr, tl.sum(sums, 0), mask=there[:, None])
    ends = at + heads * W * (V + 1) + first // W + tl.arange(0, M)
    tl.store(ends, top, mask=there)
    tl.store(ends + heads, tl.sum(total, 0), mask=there)


@triton.jit
def gate_of(a, flow, batch, tokens, ok, tokens_all, sums, eps, ROW_SUM: tl.constexpr, W: tl.constexpr,
            ROUGH: tl.constexpr):  # fmt: skip
    """σ(Ī) and the inverse of the denominator, (tokens, heads) each."""
    by_out = flow_of(flow, batch, tokens, ok, tokens_all, 2, W)
    gate = sigmoid(tl.sum(a * by_out, 2) + eps * tl.sum(by_out, 2), ROUGH)
    if ROW_SUM:
        return gate, inverse(tl.sum(a * sums, 2) + eps)
    of_k = flow_of(flow, batch, tokens, ok, tokens_all, 0, W)
    return gate, inverse(tl.sum(a * of_k, 2) + eps * tl.sum(of_k, 2))
