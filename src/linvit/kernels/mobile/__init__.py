"""Mobile-Attention as one op, forward and backward: `mobile(q, k, v, small)`, linvit::mobile.

q, k and v are a host's `(batch, heads, tokens, head_dim)` in any strides; their channels are cut into heads of `small`.
Sums are in float32 and in fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

from torch import Size, Tensor

from linvit.kernels.fused import FusedOp, unserved
from linvit.kernels.mobile import launch
from linvit.kernels.mobile.launch import Options
from linvit.kernels.operators import register

SMALL = (1, 2, 4, 8)  # channels of a small head that fit the tiles
WIDEST = 2048  # channels of a token that fit a program's registers


def why_not(q: Tensor, k: Tensor, v: Tensor, small: int) -> str | None:
    """Why the kernels cannot serve these tensors, or None where they can."""
    why = unserved(q, k, v)
    if why is not None:
        return why
    channels, value_channels = q.shape[1] * q.shape[3], v.shape[1] * v.shape[3]
    if small not in SMALL:
        return f"small heads of {small} channels have no kernel, only those of {', '.join(map(str, SMALL))}"
    if channels % small or value_channels * small % channels or value_channels * small // channels not in SMALL:
        return f"the {value_channels} channels of v do not divide into {channels // small} heads of 1, 2, 4 or 8"
    if max(channels, value_channels) > WIDEST:
        return f"{max(channels, value_channels)} channels of a token are more than {WIDEST}"
    return None


def flops(q: Size, v: Size, options: Options) -> int:
    """2 per multiply-accumulate: both products, and four or five dot products of a token's channels."""
    batch, heads, tokens, head_dim = q
    dots = (4 if options.released else 5) * heads * head_dim
    return 2 * batch * tokens * (2 * v[1] * v[3] * options.small + dots)


def saved_sizes(q: Tensor, v: Tensor, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the flows of each token and the state of each image."""
    batch, heads, tokens, head_dim = q.shape
    small_heads = heads * head_dim // options.small
    numbers = small_heads * (options.small * (v.shape[1] * v.shape[3] // small_heads + 1) + 1)
    return (batch, tokens, 4, options.small), (batch, numbers)


op = register(
    FusedOp(
        "mobile", Options, launch.forward, launch.backward,
        flops=flops, saved=("flow", "state"), saved_sizes=saved_sizes,
    )
)  # fmt: skip


def mobile(
    q: Tensor, k: Tensor, v: Tensor, small: int, *, released: bool = False, eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mobile-Attention with its flows and head competition, the poster's variant or the released code's.

    `mask`, boolean (batch, tokens), is true for the keys that take part.
    """
    return op(q, k, v, mask, None, Options(small, released, eps))
