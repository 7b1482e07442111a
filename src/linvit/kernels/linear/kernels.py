# mypy: disable-error-code="no-untyped-def, assignment"
"""Linear attention in Triton: two phases forward and two backward, and the kernels that are made of them.

One program serves G heads side by side, so that small heads still read whole memory lines: their features stand in the
columns of one tile, `state = phi(k)ᵀ · v` is one matrix product, and its blocks off the diagonal are dropped.

    keys phase             state, Σ phi(k), Σ v       reads k, v
    queries phase          out                        reads q
    query gradient phase   dq, and the gradients of state and sums   reads q, d out
    key gradient phase     dk, dv                     reads k, v

Each tensor is read or written once in a direction.
All strides are free; token offsets are 64-bit. Programs count value blocks fastest, then groups of heads, then batches;
the grid's second axis is the chunk of tokens. PHASE "both" runs the two phases of a direction in one program: the first
over all tokens, the second over its chunk. PHASE "keys" or "queries" runs one of them over the chunk; the first of the
two leaves partial states, which `add_partials` adds up in fixed order. Backward computes a state again that is not
saved. Rotary position turns the features that go into the state and meet it, not those of the row sum.
"""

import triton
import triton.language as tl

from linvit.kernels import tiles
from linvit.kernels.linear import features, states
from linvit.kernels.local import bands


@triton.jit
def keys_phase(k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, turn_cos, turn_sin, feature_eps,
               FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CONSTANT: tl.constexpr, TURN: tl.constexpr,
               PADDED: tl.constexpr, G: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """state = Σ phi(k)ᵀ · v, key_sum = Σ phi(k), value_sum = Σ v and the number of keys, over tokens begin … end.

    A softmax over tokens subtracts `shift` from its exponents. Any will do that keeps them in range: without one it is
    the largest of the first tile, and where later keys are too far above that, all is done again with the largest of
    all. What was subtracted returns last.
    """
    FINDS: tl.constexpr = features.over_tokens(FEATURE) and shift is None
    if FINDS:
        tokens = begin + tl.arange(0, k_tile[0].shape[0])
        keep = tiles.kept(mask, mask_n, tokens, end)
        k = tiles.as_type(tiles.load(k_tile, begin, k_n, keep, k_ok, PADDED), tl.float32)
        shift = features.first_shift(k, keep)
    elif shift is None:
        shift = ()
    state, key_sums, value_sum, count, shift = sum_keys(
        k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, turn_cos, turn_sin, feature_eps,
        FINDS, False, FEATURE, ROW_SUM, CONSTANT, TURN, PADDED, G, OPERAND, PRECISION)  # fmt: skip
    if FINDS:  # noqa: SIM102, known when it is compiled
        if features.out_of_range(key_sums, k_ok, OPERAND):
            shift = features.nothing_yet(k_tile)
            state, key_sums, value_sum, count, shift = sum_keys(
                k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, turn_cos, turn_sin, feature_eps,
                False, True, FEATURE, ROW_SUM, CONSTANT, TURN, PADDED, G, OPERAND, PRECISION)  # fmt: skip
    return states.diagonal(state, G), tiles.first_columns(key_sums), value_sum, count, shift


@triton.jit
def sum_keys(k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, turn_cos, turn_sin, feature_eps,
             HELD: tl.constexpr, RUNNING: tl.constexpr, FEATURE: tl.constexpr, ROW_SUM: tl.constexpr,
             CONSTANT: tl.constexpr, TURN: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
             OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The sums of `keys_phase`. HELD keeps exponents in range; RUNNING subtracts the largest key so far."""
    BLOCK: tl.constexpr = k_tile[0].shape[0]
    state = tiles.zeros(k_tile, v_tile, 0)
    key_sums = tiles.zeros(k_tile, None, 16)
    value_sum = tiles.no_sums(v_tile)
    count = tl.zeros([v_tile[0].shape[1]], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = tiles.kept(mask, mask_n, tokens, end)
        k = tiles.as_type(tiles.load(k_tile, start, k_n, keep, k_ok, PADDED), tl.float32)
        v = tiles.load(v_tile, start, v_n, keep, v_ok, PADDED)
        if HELD:
            k = features.held(k, shift, OPERAND)
        if RUNNING:
            most = features.larger(shift, k, keep)
            state, key_sums = features.rescaled(state, shift, most), features.rescaled(key_sums, shift, most)
            shift = most
        f = features.key_features(k, keep, k_ok, shift, feature_eps, FEATURE, PADDED, G)
        if ROW_SUM or features.over_tokens(FEATURE):
            key_sums = tiles.add_row(key_sums, tiles.as_type(f, OPERAND), PRECISION)
        if TURN != "":
            cos = features.angles(turn_cos, start, tokens, end, 1)
            sin = features.angles(turn_sin, start, tokens, end, 0)
            f = features.turned(f, cos, sin, TURN, G)
        state = tiles.add_products(state, tiles.as_type(f, OPERAND), tiles.as_type(v, OPERAND), PRECISION)
        if CONSTANT:
            value_sum = tiles.add_sums(value_sum, tiles.as_type(v, tl.float32))
            count += tl.sum(keep.to(tl.float32))
        state, key_sums = tiles.settled(state), tiles.settled(key_sums)
    return state, key_sums, value_sum, count, shift


@triton.jit
def queries_phase(q_tile, v_tile, v_sides, out_tile, mask, q_n, v_n, out_n, mask_n, begin, end, keys, q_ok, v_ok, near,
                  state, key_sum, value_sum, count, turn_cos, turn_sin,
                  constant, scale, eps, feature_eps, own, norm_eps,
                  FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, CONSTANT: tl.constexpr,
                  OWN: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
                  COMPUTE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """out for the queries begin … end; `near` are the matrices of a filter along the tokens, if there is one."""
    BLOCK: tl.constexpr = q_tile[0].shape[0]
    state = tiles.as_type(state, COMPUTE)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        rows = (tokens < end)[:, None]
        q = tiles.as_type(tiles.load(q_tile, start, q_n, rows, q_ok, PADDED), tl.float32)
        f = features.feature_map(q, None, q_ok, feature_eps, FEATURE, PADDED, G)
        met = f
        if TURN != "":
            cos = features.angles(turn_cos, start, tokens, end, 1)
            sin = features.angles(turn_sin, start, tokens, end, 0)
            met = features.turned(f, cos, sin, TURN, G)
        out = tiles.times(tiles.as_type(met, COMPUTE), state, PRECISION)
        if CONSTANT:
            out = tiles.plus(out, tiles.multiples(value_sum, constant))
        if ROW_SUM:
            total = features.row_sums(f, rows, key_sum, count, constant, eps, CLAMP, CONSTANT, G)
            out = tiles.scaled(out, scale / total, G)
        else:
            out = tiles.each_times(out, scale)
        if OWN or near is not None:
            v = tiles.load(v_tile, start, v_n, rows, v_ok, PADDED)
        if OWN:
            mine = tiles.each_times(tiles.as_type(v, tl.float32), own)
            if mask is not None:
                mine = tiles.where(tiles.kept(mask, mask_n, tokens, end), mine)
            out = tiles.plus(out, mine)
        if NORM:
            out = tiles.scaled(out, 1 / tl.maximum(tl.sqrt(tiles.head_sums(out, out, G)), norm_eps), G)
        if near is not None:
            side = start + tl.arange(0, bands.SIDE)[:, None]
            before = tiles.load(v_sides, start - bands.SIDE, v_n, side >= bands.SIDE, v_ok, PADDED)
            after = tiles.load(v_sides, start + BLOCK, v_n, side < keys - BLOCK, v_ok, PADDED)
            beside = bands.filtered(near, tiles.as_type(before, COMPUTE), tiles.as_type(v, COMPUTE),
                                    tiles.as_type(after, COMPUTE), G, PRECISION)  # fmt: skip
            out = tiles.plus(out, beside)
        tiles.store(out_tile, start, out_n, out, rows, v_ok, PADDED)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "query_chunk", "key_chunk", "prefix"])
def forward_kernel(
    q, k, v, out, mask, cos, sin, constant, weight, shift, state,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, out_b, out_h, out_n, out_d, mask_b, mask_n,
    cos_b, cos_h, cos_n, cos_d, weight_h, weight_n, heads, queries, keys, prefix, query_chunk, key_chunk,
    scale, eps, feature_eps, own, norm_eps,
    PHASE: tl.constexpr, FEATURE: tl.constexpr, ROW_SUM: tl.constexpr, CLAMP: tl.constexpr, SQUARED: tl.constexpr,
    OWN: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, TAPS: tl.constexpr, D: tl.constexpr, VD: tl.constexpr,
    G: tl.constexpr, DW: tl.constexpr, DR: tl.constexpr, VW: tl.constexpr, VR: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, STATE_BLOCK: tl.constexpr, UNIT: tl.constexpr, PADDED: tl.constexpr, OPERAND: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = G * DW + DR
    V: tl.constexpr = G * VW + VR
    NUMBERS: tl.constexpr = C * V + C + V + G * VW
    CONSTANT: tl.constexpr = constant is not None
    q_b, q_h, q_n = tiles.strides(q_b, q_h, q_n, UNIT)
    k_b, k_h, k_n = tiles.strides(k_b, k_h, k_n, UNIT)
    v_b, v_h, v_n = tiles.strides(v_b, v_h, v_n, UNIT)
    out_b, out_h, out_n = tiles.strides(out_b, out_h, out_n, UNIT)
    pid, chunk = tl.program_id(0), tl.program_id(1)
    groups = tl.cdiv(heads, G)
    head = pid // BLOCKS % groups * G
    batch = pid // (BLOCKS * groups)
    first = pid % BLOCKS * VW
    k_ok, v_ok = tiles.columns(head, heads, 0, D, G, DW, DR), tiles.columns(head, heads, first, VD, G, VW, VR)
    v_tile = tiles.tiles(v, batch, head, first, v_b, v_h, v_n, v_d, STATE_BLOCK, G, VW, VR)
    k_tile = tiles.tiles(k, batch, head, 0, k_b, k_h, k_n, k_d, STATE_BLOCK, G, DW, DR)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    turn_cos = features.turns(cos, batch, head, heads, cos_b, cos_h, cos_n, cos_d, prefix, TURN, D, BLOCK, G, DW, DR)
    turn_sin = features.turns(sin, batch, head, heads, cos_b, cos_h, cos_n, cos_d, prefix, TURN, D, BLOCK, G, DW, DR)
    if state is not None:
        place = pid.to(tl.int64)
        if PHASE == "keys":
            place += chunk * tl.num_programs(0)
        state += place * NUMBERS

    if PHASE == "queries":
        s, key_sum, value_sum, count = states.load_state(state, G * DW, DR, G * VW, VR)
    else:
        begin, end = 0, keys
        if PHASE == "keys":
            begin, end = chunk * key_chunk, min(keys, (chunk + 1) * key_chunk)
        if shift is not None:
            shift = tiles.load_row(shift, batch, heads, head, k_ok, D, G, DW)
        s, key_sum, value_sum, count, _ = keys_phase(
            k_tile, v_tile, mask, k_n, v_n, mask_n, begin, end, k_ok, v_ok, shift, turn_cos, turn_sin, feature_eps,
            FEATURE, ROW_SUM, CONSTANT, TURN, PADDED, G, OPERAND, PRECISION)  # fmt: skip
        if state is not None and (PHASE == "keys" or chunk == 0):
            states.save_state(state, s, key_sum, value_sum, count)

    if PHASE != "keys":
        c = 0.0
        if CONSTANT:
            c = tl.load(constant).to(tl.float32)
            if SQUARED:
                c = c * c
        if features.over_tokens(FEATURE):
            s = states.averaged(s, key_sum)
        q_tile = tiles.tiles(q, batch, head, 0, q_b, q_h, q_n, q_d, BLOCK, G, DW, DR)
        v_tile = tiles.tiles(v, batch, head, first, v_b, v_h, v_n, v_d, BLOCK, G, VW, VR)
        v_sides = tiles.tiles(v, batch, head, first, v_b, v_h, v_n, v_d, bands.SIDE, G, VW, VR)
        out_tile = tiles.tiles(out, batch, head, first, out_b, out_h, out_n, out_d, BLOCK, G, VW, VR)
        begin, end = chunk * query_chunk, min(queries, (chunk + 1) * query_chunk)
        near = None
        if TAPS:
            near = bands.bands(weight, head, heads, weight_h, weight_n, TAPS, BLOCK, False, G, COMPUTE)
        queries_phase(
            q_tile, v_tile, v_sides, out_tile, mask, q_n, v_n, out_n, mask_n, begin, end, keys, k_ok, v_ok, near,
            s, key_sum, value_sum, count, turn_cos, turn_sin, c, scale, eps, feature_eps, own, norm_eps,
            FEATURE, ROW_SUM, CLAMP, CONSTANT, OWN, NORM, TURN, PADDED, G, COMPUTE, PRECISION)  # fmt: skip


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
