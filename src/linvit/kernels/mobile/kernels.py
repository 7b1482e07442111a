"""Triton code of Mobile-Attention: many heads of a few channels each, which compete at every token.

Heads this small leave nothing for a matrix unit, so a token's channels are one row, taken as (heads, channels) in
registers, and every product is an elementwise one in float32. What couples the heads of a token is four small vectors,

    flow = Σ phi(k) + eps,  Σ phi(q) + eps,  Σ phi(k)/O + eps,  Σ phi(q)/I + eps      sums over heads

which `flows_kernel` writes once; with them I, O, Ī and Ō of a head are dot products of its own channels, and the other
kernels can split the heads among programs. Only the last step of the backward pass needs all heads of a token again.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def tile(ptr, batch, tokens, ok, stride_b, stride_h, stride_n, stride_d, first, channels,
         D: tl.constexpr, M: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """Tokens × M small heads × W channels in float32, from channel `first` on; zero where there is nothing."""
    channel = first + tl.arange(0, M * W)
    inner = (channel // D) * stride_h + (channel % D) * stride_d
    rows = ptr + batch.to(tl.int64) * stride_b + tokens.to(tl.int64)[:, None] * stride_n
    x = tl.load(rows + inner[None, :], mask=ok[:, None] & (channel < channels)[None, :], other=0.0)
    return tl.reshape(x.to(tl.float32), [tokens.shape[0], M, W])


@triton.jit
def put(ptr, batch, tokens, ok, stride_b, stride_n, first, channels, x):
    """The inverse of `tile`, into dense channels."""
    channel = first + tl.arange(0, x.shape[1] * x.shape[2])
    rows = ptr + batch.to(tl.int64) * stride_b + tokens.to(tl.int64)[:, None] * stride_n
    x = tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]]).to(ptr.dtype.element_ty)
    tl.store(rows + channel[None, :], x, mask=ok[:, None] & (channel < channels)[None, :])


@triton.jit
def phi(x, first, heads, W: tl.constexpr):
    """Sigmoid; zero for heads that only fill the tile."""
    head = first // W + tl.arange(0, x.shape[1])
    root = tl.rsqrt(1 + tl.exp(-x))  # squared it is the sigmoid, in fewer instructions than a division
    return tl.where((head < heads)[None, :, None], root * root, 0.0)


@triton.jit
def flow_of(flow, batch, tokens, ok, count, WHICH: tl.constexpr, W: tl.constexpr):
    """One of the four vectors of each token, (tokens, 1, W)."""
    at = flow + ((batch.to(tl.int64) * count + tokens)[:, None] * 4 + WHICH) * W + tl.arange(0, W)[None, :]
    return tl.load(at, mask=ok[:, None], other=1.0)[:, None, :]


@triton.jit
def flows_kernel(q, k, flow, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, channels, tokens_all, eps,
                 D: tl.constexpr, M: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The four vectors of BLOCK tokens."""
    blocks = tl.cdiv(tokens_all, BLOCK)
    batch = tl.program_id(0) // blocks
    tokens = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    ok = tokens < tokens_all
    heads = channels // W
    a = phi(tile(q, batch, tokens, ok, q_b, q_h, q_n, q_d, 0, channels, D, M, W), 0, heads, W)
    c = phi(tile(k, batch, tokens, ok, k_b, k_h, k_n, k_d, 0, channels, D, M, W), 0, heads, W)
    of_k, of_q = tl.sum(c, 1) + eps, tl.sum(a, 1) + eps
    incoming = tl.sum((a + eps) * of_k[:, None, :], 2)
    outgoing = tl.sum((c + eps) * of_q[:, None, :], 2)
    by_out = tl.sum(c * (1 / outgoing)[:, :, None], 1) + eps
    by_in = tl.sum(a * (1 / incoming)[:, :, None], 1) + eps
    at = flow + (batch.to(tl.int64) * tokens_all + tokens)[:, None] * (4 * W) + tl.arange(0, W)[None, :]
    tl.store(at, of_k, mask=ok[:, None])
    tl.store(at + W, of_q, mask=ok[:, None])
    tl.store(at + 2 * W, by_out, mask=ok[:, None])
    tl.store(at + 3 * W, by_in, mask=ok[:, None])


@triton.jit
def state_at(ptr, first, heads, W: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
    """Pointers to the state (M, W, V) and the sums (M, W) of the heads from channel `first` on, and which are there."""
    head = first // W + tl.arange(0, M)
    i, j = tl.arange(0, W), tl.arange(0, V)
    state = ptr + (head[:, None, None] * W + i[None, :, None]) * V + j[None, None, :]
    sums = ptr + heads * W * V + head[:, None] * W + i[None, :]
    return state, sums, head < heads


@triton.jit
def pick(x, which, N: tl.constexpr):
    """Channel `which` of each head, (tokens, heads, 1): x is (tokens, heads, N) and stays where it is in registers."""
    return tl.sum(tl.where((tl.arange(0, N) == which)[None, None, :], x, 0.0), 2)[:, :, None]


@triton.jit
def rows_of_state(ptr, first, channels, row, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """state[:, row, :] as (1, M, V)."""
    value = tl.arange(0, M * V)
    channel = first + value // V * W + row
    x = tl.load(ptr + channel * V + value % V, mask=channel < channels, other=0.0)
    return tl.reshape(x, [1, M, V])


@triton.jit
def columns_of_state(ptr, first, channels, column, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """state[:, :, column] as (1, M, W)."""
    channel = first + tl.arange(0, M * W)
    return tl.reshape(tl.load(ptr + channel * V + column, mask=channel < channels, other=0.0), [1, M, W])


@triton.jit
def sums_of_state(ptr, first, channels, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """The sums over tokens beside the state, as (1, M, W)."""
    channel = first + tl.arange(0, M * W)
    return tl.reshape(tl.load(ptr + channels * V + channel, mask=channel < channels, other=0.0), [1, M, W])


@triton.jit
def times_state(a, ptr, first, channels, W: tl.constexpr, V: tl.constexpr):
    """a · state, head by head: (tokens, M, V)."""
    M: tl.constexpr = a.shape[1]
    y = pick(a, 0, W) * rows_of_state(ptr, first, channels, 0, M, W, V)
    for i in tl.static_range(1, W):
        y += pick(a, i, W) * rows_of_state(ptr, first, channels, i, M, W, V)
    return y


@triton.jit
def times_state_transposed(x, ptr, first, channels, W: tl.constexpr, V: tl.constexpr):
    """x · stateᵀ, head by head: (tokens, M, W)."""
    M: tl.constexpr = x.shape[1]
    y = pick(x, 0, V) * columns_of_state(ptr, first, channels, 0, M, W, V)
    for j in tl.static_range(1, V):
        y += pick(x, j, V) * columns_of_state(ptr, first, channels, j, M, W, V)
    return y


@triton.jit
def finish_state(ptr, first, heads, state, sums, top, total, count, FINAL: tl.constexpr):
    """Write one program's state: to be combined with others', or for good, divided by the softmax's total."""
    M: tl.constexpr = state.shape[0]
    W: tl.constexpr = state.shape[1]
    V: tl.constexpr = state.shape[2]
    state_ptr, sums_ptr, there = state_at(ptr, first, heads, W, V, M)
    ends = ptr + heads * W * (V + 1) + first // W + tl.arange(0, M)
    if FINAL:
        state *= (count / total)[:, None, None]
        top += tl.log(total)
    else:
        tl.store(ends + heads, total, mask=there)
    tl.store(state_ptr, state, mask=there[:, None, None])
    tl.store(sums_ptr, sums, mask=there[:, None])
    tl.store(ends, top, mask=there)


@triton.jit
def keys_kernel(k, v, flow, mask, counts, partial, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, mask_b, mask_n,
                channels, value_channels, batches, tokens_all, chunk, size, count, eps,
                D: tl.constexpr, VD: tl.constexpr, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
                BLOCK: tl.constexpr, CLAMP: tl.constexpr, FINAL: tl.constexpr):  # fmt: skip
    """State, sums and softmax of M heads over one chunk of tokens. Every lane of BLOCK keeps a maximum of its own."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    heads = channels // W
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, tokens_all)
    state = tl.zeros([BLOCK, M, W, V], tl.float32)
    sums = tl.zeros([BLOCK, M, W], tl.float32)
    total = tl.zeros([BLOCK, M], tl.float32)
    top = tl.full([BLOCK, M], float("-inf"), tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = tokens < end
        if mask is not None:
            at = mask + batch.to(tl.int64) * mask_b + tokens.to(tl.int64) * mask_n
            keep = keep & tl.load(at, mask=keep, other=0).to(tl.int1)
        c = phi(tile(k, batch, tokens, keep, k_b, k_h, k_n, k_d, first, channels, D, M, W), first, heads, W)
        c = tl.where(keep[:, None, None], c, 0.0)
        x = tile(v, batch, tokens, keep, v_b, v_h, v_n, v_d, first // W * V, value_channels, VD, M, V)
        flowing = tl.sum((c + eps) * flow_of(flow, batch, tokens, keep, tokens_all, 3, W), 2)
        if CLAMP:
            flowing = tl.minimum(tl.maximum(flowing, -1.0), 1.0)
        flowing = tl.where(keep[:, None], flowing, float("-inf"))
        higher = tl.maximum(top, flowing)
        zero = tl.where(higher == float("-inf"), 0.0, higher)
        weight, shrink = tl.exp(flowing - zero), tl.exp(top - zero)
        total = total * shrink + weight
        outer = (c * weight[:, :, None])[:, :, :, None] * x[:, :, None, :]
        state = state * shrink[:, :, None, None] + outer
        sums += c
        top = higher
    highest = tl.max(top, 0)
    shrink = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
    state = tl.sum(state * shrink[:, :, None, None], 0)
    if FINAL and counts is not None:
        count = tl.load(counts + batch)
    at = partial + (tl.program_id(1) * batches + batch).to(tl.int64) * size
    finish_state(at, first, heads, state, tl.sum(sums, 0), highest, tl.sum(total * shrink, 0), count, FINAL)


@triton.jit
def combine_kernel(partial, final, counts, channels, batches, chunks, size, count,
                   M: tl.constexpr, W: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """The chunks' states into one, in order."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    heads = channels // W
    state = tl.zeros([M, W, V], tl.float32)
    sums = tl.zeros([M, W], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    for number in tl.range(0, chunks):
        at = partial + (number * batches + batch).to(tl.int64) * size
        state_ptr, sums_ptr, there = state_at(at, first, heads, W, V, M)
        ends = at + heads * W * (V + 1) + first // W + tl.arange(0, M)
        theirs = tl.load(ends, mask=there, other=float("-inf"))
        higher = tl.maximum(top, theirs)
        zero = tl.where(higher == float("-inf"), 0.0, higher)
        ours, other = tl.exp(top - zero), tl.exp(theirs - zero)
        more = tl.load(state_ptr, mask=there[:, None, None], other=0.0)
        state = state * ours[:, None, None] + more * other[:, None, None]
        sums += tl.load(sums_ptr, mask=there[:, None], other=0.0)
        total = total * ours + tl.load(ends + heads, mask=there, other=1.0) * other
        top = higher
    if counts is not None:
        count = tl.load(counts + batch)
    total = tl.where(first // W + tl.arange(0, M) < heads, total, 1.0)
    at = final + batch.to(tl.int64) * (size - heads)
    finish_state(at, first, heads, state, sums, top, total, count, True)


@triton.jit
def gate_of(a, flow, batch, tokens, ok, tokens_all, sums, eps, ROW_SUM: tl.constexpr, W: tl.constexpr):
    """σ(Ī) and the denominator, (tokens, heads) each."""
    gate = tl.sigmoid(tl.sum((a + eps) * flow_of(flow, batch, tokens, ok, tokens_all, 2, W), 2))
    if ROW_SUM:
        return gate, tl.sum(a * sums, 2) + eps
    return gate, tl.sum((a + eps) * flow_of(flow, batch, tokens, ok, tokens_all, 0, W), 2)


@triton.jit
def queries_kernel(q, flow, final, out, q_b, q_h, q_n, q_d, o_b, o_n, channels, value_channels, tokens_all, size, eps,
                   D: tl.constexpr, M: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
                   BLOCK: tl.constexpr, ROW_SUM: tl.constexpr):  # fmt: skip
    """The output of M heads at BLOCK tokens."""
    groups = tl.cdiv(channels, M * W)
    batch, first = tl.program_id(0) // groups, tl.program_id(0) % groups * (M * W)
    heads = channels // W
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = tokens < tokens_all
    here = final + batch.to(tl.int64) * size
    sums = sums_of_state(here, first, channels, M, W, V)
    a = phi(tile(q, batch, tokens, ok, q_b, q_h, q_n, q_d, first, channels, D, M, W), first, heads, W)
    gate, below = gate_of(a, flow, batch, tokens, ok, tokens_all, sums, eps, ROW_SUM, W)
    y = times_state(a, here, first, channels, W, V)
    put(out, batch, tokens, ok, o_b, o_n, first // W * V, value_channels, y * (gate / below)[:, :, None])
