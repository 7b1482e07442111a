# mypy: disable-error-code="no-untyped-def, assignment"
"""Functions in as few instructions as the chip has for them; Triton's own spend several on denormal numbers too."""

import triton
import triton.language as tl

from linvit.kernels.tiles import INTERPRETED


@triton.jit
def inverse(x):
    """1 / x in one instruction, to 1e-7."""
    if INTERPRETED:
        return 1 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp(x):
    x *= 1.4426950408889634
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.constexpr_function
def rough(dtype):
    """Whether inputs of this type are rounded more than a sigmoid by way of the hardware's tanh is off, 2.5e-4."""
    return dtype != tl.float32 and not INTERPRETED


@triton.jit
def sigmoid(x, ROUGH: tl.constexpr):
    """By tanh in one slow instruction; exactly in two, which are what these kernels would wait for."""
    if ROUGH:
        x = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], dtype=tl.float32, is_pure=True, pack=1
        )
        return 0.5 + 0.5 * x
    else:
        return inverse(1 + exp(-x))
