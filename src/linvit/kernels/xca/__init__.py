"""Cross-covariance attention as one op, forward and backward: `xca(q, k, v, temperature)`, linvit::xca.

Every tensor is read or written once in a direction. Sums are in float32 and in fixed order: the same inputs give the
same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.kernels import fused
from linvit.kernels.fused import (
    Given,
    Launch,
    Strides,
    in_units,
    launch_cache,
    processors,
    rows_like,
    shared_memory,
    signature_of,
)
from linvit.kernels.linear.layout import ENOUGH, pieces
from linvit.kernels.operators import register

WIDEST = {2: 128, 4: 64}  # channels of a head whose products fit a program's registers, by itemsize
MOST = 32  # sums of chunks that a program of the second phase adds up


class Options(NamedTuple):
    norm: bool  # q and k have unit length over the tokens; otherwise scores are divided by the root of their number
    eps: float


class Tiles(NamedTuple):
    """Tokens that a program takes at a time, its warps and pipeline stages."""

    block: int
    warps: int
    stages: int


def tiles_of(which: str, columns: int, itemsize: int, memory: int) -> Tiles:
    """The rule for "forward" and "backward", the same in each phase."""
    if itemsize > 2 or memory < ENOUGH:
        return Tiles(32, 4, 1) if columns <= 64 else Tiles(16 if itemsize > 2 else 32, 8, 1)
    return Tiles(64, 4, 3 if which == "forward" else 2) if columns < 128 else Tiles(32, 8, 2)


def split_of(programs: int, tokens: int, block: int, processors: int) -> int:
    """Into how many chunks the tokens fall; one is one launch."""
    if programs >= processors or (2 * programs >= processors and tokens <= 1024) or tokens <= 4 * block:
        return 1
    return min(MOST, -(-2 * processors // programs), -(-tokens // (2 * block)))


def numbers_of(dim: int) -> int:
    """Sums that a head has: of products, and of squares of q and k."""
    columns = sum(pieces(dim, 16))
    return columns * (columns + 2)


@launch_cache
def prepare(
    which: str, signature: tuple[Any, ...], mask_strides: Strides | None, options: Options,
    strides: tuple[Strides, ...], temperature: torch.dtype | None, writes: bool,
) -> tuple[Launch, ...]:  # fmt: skip
    """The launch "forward" or "backward", or one for each phase; `strides` are of its tensors beside q, k and v.

    `temperature` is its type, and `writes` whether the state or the temperature's gradient is written: a kernel is
    compiled for that.
    """
    from linvit.kernels.xca import kernels

    q, _, _, q_strides, k_strides, v_strides, dtype, *_, device, _, _ = signature
    batch, heads, tokens, dim = q
    width, rest = pieces(dim, 16)
    t = tiles_of(which, width + rest, dtype.itemsize, shared_memory(device))
    chunks = split_of(batch * heads, tokens, t.block, processors(device))
    chunk = -(-tokens // (chunks * t.block)) * t.block
    chunks = -(-tokens // chunk)
    kind, wide_kind, precision = fused.operands(dtype, device.type == "cpu")
    unit, in_order = in_units(dtype.itemsize, q_strides, k_strides, v_strides, *strides)
    step = batch * heads * numbers_of(dim)
    values: tuple[Any, ...] = (*in_order, *(mask_strides or (0, 0)), heads, tokens, chunk, chunks, step, tokens**-0.5)
    values += (max(options.eps, fused.LEAST), dim, width, rest, t.block, unit, options.norm)
    kernel, kinds = {
        "forward": (kernels.forward_kernel, (kind, kind)),
        "backward": (kernels.backward_kernel, (wide_kind,)),
    }[which]
    phases = ("both",) if chunks == 1 else ("first", "second")
    grid = (batch * heads, chunks, 1)
    return tuple(
        Launch(kernel, grid, (*values, phase, *kinds, precision), num_warps=t.warps, num_stages=t.stages)
        for phase in phases
    )


def partial_of(launches: tuple[Launch, ...], q: Tensor) -> Tensor | None:
    """Room for the sums that the first of two launches leaves."""
    if len(launches) == 1:
        return None
    numbers = q.shape[0] * q.shape[1] * numbers_of(q.shape[3])
    return torch.empty((launches[0].grid[1], numbers), dtype=torch.float32, device=q.device)


def kind_of(temperature: Tensor | None) -> torch.dtype | None:
    return None if temperature is None else temperature.dtype


def counts_of(mask: Tensor | None, options: Options) -> Tensor | None:
    return None if mask is None or options.norm else mask.sum(-1).float()


def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options, save: bool, signature: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None]:
    """The output, and the products and lengths of each head."""
    mask, temperature = given
    out = rows_like(v)
    masks = None if mask is None else mask.stride()
    launches = prepare("forward", signature, masks, options, (out.stride()[:3],), kind_of(temperature), save)
    partial = partial_of(launches, q)
    state = torch.empty(saved_sizes(q, v, options)[0], dtype=torch.float32, device=q.device) if save else None
    for launch in launches:
        launch(q, k, v, out, mask, temperature, counts_of(mask, options), partial, state)
    return out, state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, given: Given,
    saved: list[Tensor], options: Options, wanted: tuple[bool, ...],
) -> tuple[Tensor | None]:  # fmt: skip
    """Writes dq, dk and dv, whose channels are dense, and returns the temperature's gradient where that is wanted."""
    (mask, temperature), (state,) = given, saved
    strides = (grad.stride(), *(d.stride()[:3] for d in (dq, dk, dv)))
    masks = None if mask is None else mask.stride()
    asked = temperature is not None and wanted[0]
    launches = prepare("backward", signature_of(q, k, v), masks, options, strides, kind_of(temperature), asked)
    partial = partial_of(launches, q)
    shares = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if asked else None
    others = (mask, temperature, counts_of(mask, options), partial, state, shares)
    for launch in launches:
        launch(q, k, v, grad, dq, dk, dv, *others)
    if shares is None or temperature is None:
        return (None,)
    return (shares.sum(0).to(temperature.dtype),)


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot serve these tensors, or None where they can."""
    why = fused.unserved(q, k, v)
    if why is not None:
        return why
    widest = WIDEST[q.dtype.itemsize]
    return f"heads of {q.shape[3]} channels are wider than {widest}" if q.shape[3] > widest else None


def flops(q: torch.Size, v: torch.Size, options: Options, given: Given) -> int:
    """2 per multiply-accumulate of the two products."""
    batch, heads, tokens, dim = q
    return 4 * batch * heads * tokens * dim * dim


def saved_sizes(q: Tensor, v: Tensor, options: Options) -> tuple[tuple[int, ...]]:
    return ((q.shape[0] * q.shape[1], numbers_of(q.shape[3])),)


op = register(
    fused.FusedOp(
        "xca", Options, forward, backward,
        flops=flops, learned=("temperature",), saved=("state",), saved_sizes=saved_sizes, lazy=True,
    )
)  # fmt: skip


def xca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None = None,
    *,
    eps: float = 1e-12,
    mask: Tensor | None = None,
) -> Tensor:
    """`v · softmax(q̂ᵀ · k̂ · τ)ᵀ` with a temperature per head; without one the Fair Comparison's, q and k as they are.

    `mask`, boolean (batch, tokens), is true for the tokens that q and k have.
    """
    return op(q, k, v, (mask, temperature), Options(temperature is not None, eps))
