# mypy: disable-error-code="no-untyped-def, assignment"
"""A filter along the tokens as a product of matrices: a band of its taps times a block of tokens and 16 on each side.

Values are tuples of pieces and heads may share a tile, as in `linvit.kernels.tiles`; each head has its own band.
"""

import triton
import triton.language as tl

SIDE = tl.constexpr(16)  # tokens on each side, half as many as taps or more


@triton.jit
def taps(FIRST: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Which tap leads from each of BLOCK tokens to each of WIDTH from the FIRST on, counted from the block's."""
    return FIRST + tl.arange(0, WIDTH)[None, :] - tl.arange(0, BLOCK)[:, None] + TAPS // 2


@triton.jit
def _band(weight, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
          BACK: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    tap = taps(FIRST, WIDTH, TAPS, BLOCK)
    place = TAPS - 1 - tap if BACK else tap
    return tl.load(weight + place * stride, mask=(tap >= 0) & (tap < TAPS), other=0.0).to(TYPE)


@triton.jit
def bands(weight, head, heads, stride_h, stride, TAPS: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
          G: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Of each of G heads from `head` on three matrices: for the tokens before the block, the block and those after."""
    out = ()
    for g in tl.static_range(G):
        start = weight + tl.minimum(head + g, heads - 1) * stride_h
        out += (_band(start, stride, -SIDE, SIDE, TAPS, BLOCK, BACK, TYPE),)
        out += (_band(start, stride, 0, BLOCK, TAPS, BLOCK, BACK, TYPE),)
        out += (_band(start, stride, BLOCK, SIDE, TAPS, BLOCK, BACK, TYPE),)
    return out


@triton.jit
def filtered(matrices, before, own, after, G: tl.constexpr, PRECISION: tl.constexpr):
    """The block's tokens filtered."""
    out = ()
    for i in tl.static_range(len(own)):
        total = _filtered(matrices, 0, before[i], own[i], after[i], PRECISION)
        for g in tl.static_range(1, G):
            of_head = (tl.arange(0, own[i].shape[1]) // (own[i].shape[1] // G))[None, :] == g
            total = tl.where(of_head, _filtered(matrices, g, before[i], own[i], after[i], PRECISION), total)
        out += (total,)
    return out


@triton.jit
def _filtered(matrices, g: tl.constexpr, before, own, after, PRECISION: tl.constexpr):
    total = tl.dot(matrices[3 * g + 1], own, input_precision=PRECISION)
    total = tl.dot(matrices[3 * g], before, total, input_precision=PRECISION)
    return tl.dot(matrices[3 * g + 2], after, total, input_precision=PRECISION)
