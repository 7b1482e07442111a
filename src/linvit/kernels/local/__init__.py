"""The local branch as one op: `filtered(v, weight, bias, grid, onto)` is `onto` + a depthwise filter of the values.

Values are `(batch, heads, tokens, value_dim)` in any strides, as in a packed projection; the output has the layout that
output projections read. A filter over the grid, k × k, adds nothing to the tokens before it. One along the tokens is a
filter k × 1 over a grid of a single column. Weights are `(batch, heads, value_dim, rows, columns)`, a bias `(1, heads,
value_dim)`; what is shared has size one. Sums are in float32, in fixed order: the same inputs give the same bits.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linvit.kernels import fused
from linvit.kernels.fused import Launch, Strides, in_units, launch_cache, plain, power_of_two, processors, rows_like
from linvit.kernels.operators import library

WIDEST = 128  # channels that a program takes
TILE, GRADIENT_TILE = 4096, 1024  # numbers of a tile; that of the weights' gradient is held once for every tap
MOST_TAPS = 9  # taps that a program of the weights' gradient takes at a time
LARGEST = 15  # rows or columns of a filter
MOST_TAPS_ALONG = 33  # of a filter along the tokens that a matrix product does, see bands.py


class Grid(NamedTuple):
    """Where patches lie: rows, columns, and tokens before them."""

    height: int
    width: int
    prefix: int = 0


def along_tokens(weight: Tensor, bias: Tensor | None, grid: Grid) -> Strides | None:
    """Of a filter along the tokens, shared by a head's channels, the strides of heads and taps, and how many taps."""
    if bias is not None or grid.width != 1 or grid.prefix:
        return None
    batch, heads, width, taps, columns = weight.shape
    if batch != 1 or width != 1 or columns != 1 or taps % 2 == 0 or taps > MOST_TAPS_ALONG:
        return None
    return (weight.stride(1) if heads > 1 else 0, weight.stride(3), taps)


class Signature(NamedTuple):
    """Everything that launches depend on; strides of what is not there are empty."""

    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    grid: Grid
    v: Strides
    weight: Strides
    bias: Strides
    base: Strides
    out: Strides
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @property
    def itemsize(self) -> int:
        """Of the values, whose type that of the output is."""
        return self.dtypes[0].itemsize


def shared_strides(tensor: Tensor, given: int) -> Strides:
    """Strides of a tensor's first dimensions, zero for those that are shared."""
    return tuple(
        0 if size == 1 else stride for size, stride in zip(tensor.shape[:given], tensor.stride(), strict=False)
    )


def signature_of(v: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, out: Tensor, grid: Grid) -> Any:
    tensors = (v, weight, bias, base, out)
    return Signature(
        v.shape, weight.shape, grid, v.stride(), (*shared_strides(weight, 3), *weight.stride()[3:]),
        () if bias is None else shared_strides(bias, 3)[1:], () if base is None else base.stride(), out.stride(),
        tuple(torch.bool if t is None else t.dtype for t in tensors), v.device,
    )  # fmt: skip


def tile_of(width: int, numbers: int) -> tuple[int, int, int]:
    """Blocks of channels, channels of each, and tokens of a tile of so many numbers."""
    channels = max(16, min(WIDEST, power_of_two(width)))
    return -(-width // channels), channels, max(8, numbers // channels)


@launch_cache
def prepare(signature: Signature, back: bool) -> Launch:
    from linvit.kernels.local import kernels

    batch, heads, _, width = signature.shape
    grid = signature.grid
    blocks, channels, block = tile_of(width, TILE)
    programs = -(-(grid.prefix + grid.height * grid.width) // block) * batch * heads * blocks
    unit, strides = in_units(signature.itemsize, signature.v, signature.base or (0,) * 4, signature.out)
    values = (
        *strides, *signature.weight, *(signature.bias or (0, 0)), heads, *grid,
        unit, width, blocks, channels, block, *signature.weight_shape[3:], back,
    )  # fmt: skip
    return Launch(kernels.filter_kernel, (programs, 1, 1), values, num_warps=4)


@launch_cache
def prepare_weight_gradient(signature: Signature, processors: int) -> tuple[Launch, tuple[int, ...]]:
    """The launch, and the shape of its partial sums: (images, chunks, heads, value_dim, taps and one)."""
    from linvit.kernels.local import kernels

    batch, heads, _, width = signature.shape
    rows, columns = signature.weight_shape[3:]
    patches = signature.grid.height * signature.grid.width
    blocks, channels, block = tile_of(width, GRADIENT_TILE if rows * columns <= MOST_TAPS else GRADIENT_TILE // 2)
    at_once = rows if rows * columns <= MOST_TAPS else 1
    programs = batch * heads * blocks * (rows // at_once)
    share = 1 if signature.weight_shape[0] > 1 else max(1, programs // (4 * processors))
    images = -(-batch // share)
    wanted = max(1, 4 * processors // (images * heads * blocks * (rows // at_once)))
    chunk = max(block, -(-patches // (min(wanted, 16) * block)) * block)
    chunks = -(-patches // chunk)
    unit, strides = in_units(signature.itemsize, signature.v, signature.out)
    values = (
        *strides, batch, heads, *signature.grid, share, chunk,
        unit, width, blocks, channels, block, rows, columns, at_once,
    )  # fmt: skip
    grid = (images * heads * blocks, chunks, rows // at_once)
    launch = Launch(kernels.weight_gradient_kernel, grid, values, num_warps=4)
    return launch, (images, chunks, heads, width, rows * columns + 1)


def forward(v: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, base: Tensor | None, out: Tensor) -> Tensor:
    """Writes base + filter(v) to `out`, which may be the base itself."""
    prepare(signature_of(v, weight, bias, base, out, grid), False)(v, weight, bias, base, out)
    return out


def value_gradient(grad: Tensor, weight: Tensor, grid: Grid, base: Tensor | None, dv: Tensor) -> Tensor:
    """Writes the values' gradient to `dv`, added to `base`, which may be dv itself."""
    prepare(signature_of(grad, weight, None, base, dv, grid), True)(grad, weight, None, base, dv)
    return dv


def weight_gradient(
    grad: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, where they are wanted: sums of parts, added up in fixed order."""
    if not any(wanted):
        return None, None
    signature = signature_of(v, weight, bias, None, grad, grid)
    launch, shape = prepare_weight_gradient(signature, processors(v.device))
    partial = torch.empty(shape, dtype=torch.float32, device=v.device)
    launch(v, grad, partial)
    d_weight = d_bias = None
    if wanted[0]:
        over = [1, *(axis for axis, size in zip((0, 2, 3), weight.shape, strict=False) if size == 1)]
        d_weight = partial[..., :-1].sum(over).reshape(weight.shape).to(weight.dtype)
    if wanted[1] and bias is not None:
        over = [0, 1, *(axis + 1 for axis in (1, 2) if bias.shape[axis] == 1)]
        d_bias = partial[..., -1].sum(over).reshape(bias.shape).to(bias.dtype)
    return d_weight, d_bias


@launch_cache
def prepare_token_gradient(signature: Signature, near: Strides, weighs: bool, processors: int) -> tuple[Launch, Any]:
    """The launch, and the shape of its partial sums: (images, heads, blocks of channels and chunks, taps)."""
    from linvit.kernels.local import kernels

    batch, heads, tokens, width = signature.shape
    *places, taps = near
    channels = max(16, min(64, power_of_two(width)))
    blocks, block = -(-width // channels), 64
    chunks = max(1, min(-(-tokens // block), 3 * processors // (batch * heads * blocks)))
    chunk = -(-tokens // (chunks * block)) * block
    chunks = -(-tokens // chunk)
    unit, strides = in_units(signature.itemsize, signature.v, signature.out, signature.base)
    _, compute, precision = fused.operands(signature.dtypes[0], signature.device.type == "cpu")
    values = (
        *strides,
        *(*places, heads, tokens, chunk),
        *(weighs, unit, width, blocks, channels, block, taps, compute, precision),
    )
    stages = 2 if signature.itemsize == 2 else 1  # for graphics cards
    launch = Launch(
        kernels.token_gradient_kernel, (batch * heads * blocks, chunks, 1), values, num_warps=4, num_stages=stages
    )
    return launch, (batch, heads, blocks * chunks, taps)


def gradients(
    grad: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, dv: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Adds the values' gradient to `dv`, and returns those of weight and bias, where they are wanted."""
    near = along_tokens(weight, bias, grid)
    if near is None:
        value_gradient(grad, weight, grid, dv, dv)
        return weight_gradient(grad, v, weight, bias, grid, wanted)
    signature = signature_of(v, weight, None, dv, grad, grid)
    launch, shape = prepare_token_gradient(signature, near, wanted[0], processors(v.device))
    partial = torch.empty(shape, dtype=torch.float32, device=v.device) if wanted[0] else None
    launch(v, grad, dv, weight, partial)
    if partial is None:
        return None, None
    return partial.sum((0, 2) if weight.shape[1] > 1 else (0, 1, 2)).reshape(weight.shape).to(weight.dtype), None


def why_not(v: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot serve these tensors, or None where they can."""
    why = fused.no_kernels_on(v.device)
    if why is not None:
        return why
    if v.dtype not in fused.DTYPES or weight.dtype not in fused.DTYPES:
        return f"the tensors are {v.dtype} and {weight.dtype}, not float32, float16 or bfloat16"
    if weight.device != v.device:
        return f"the values are on {v.device} and the filter on {weight.device}"
    if not v.numel():
        return "there is nothing to filter in an empty tensor"
    return "the filter is too large" if max(weight.shape[3:]) > LARGEST else None


class _Filtered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor | None, v: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
        ctx.save_for_backward(v, weight, bias)
        ctx.grid = grid
        return forward(v, weight, bias, grid, base, rows_like(v))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fused.refuse_graph("local branch")
        v, weight, bias = ctx.saved_tensors
        of_base, of_v, *wanted, _ = ctx.needs_input_grad
        dv = value_gradient(grad, weight, ctx.grid, None, rows_like(v)) if of_v else None
        return grad if of_base else None, dv, *weight_gradient(grad, v, weight, bias, ctx.grid, tuple(wanted)), None


def filtered(v: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, onto: Tensor | None = None) -> Tensor:
    """`onto`, if it is given, plus the filtered values."""
    if not plain(v):
        return torch.ops.linvit.local_filter(onto, v, weight, bias, *grid)  # type: ignore[no-any-return]
    tensors = (onto, v, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Filtered.apply(*tensors, grid)  # type: ignore[no-any-return]
    return forward(v, weight, bias, grid, onto, rows_like(v))


def flops(v: Any, weight: Any, grid: Grid) -> int:
    """From shapes, two per multiply-accumulate of a convolution over the grid, padding included."""
    batch, heads, _, width = v
    return 2 * batch * heads * width * grid.height * grid.width * math.prod(weight[3:])


OPTIONS = "SymInt height, SymInt width, SymInt prefix"
library.define(f"local_filter(Tensor? base, Tensor v, Tensor weight, Tensor? bias, {OPTIONS}) -> Tensor")
library.define(
    f"local_filter_backward(Tensor grad, Tensor v, Tensor weight, Tensor? bias, {OPTIONS}, bool d_v, bool d_weight, "
    "bool d_bias) -> (Tensor, Tensor, Tensor)"
)


def run(base: Any, v: Tensor, weight: Tensor, bias: Any, height: int, width: int, prefix: int) -> Tensor:
    return forward(v, weight, bias, Grid(height, width, prefix), base, rows_like(v))


def run_backward(
    grad: Tensor, v: Tensor, weight: Tensor, bias: Any, height: int, width: int, prefix: int, *wanted: bool
) -> Any:
    grid = Grid(height, width, prefix)
    dv = value_gradient(grad, weight, grid, None, rows_like(v)) if wanted[0] else None
    found = (dv, *weight_gradient(grad, v, weight, bias, grid, wanted[1:]))
    return tuple(grad.new_empty(0) if d is None else d for d in found)


def fake_backward(grad: Tensor, v: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Any:
    dv, empty = rows_like(v), grad.new_empty(0)
    found = (dv, weight.new_empty(weight.shape), None if bias is None else bias.new_empty(bias.shape))
    return tuple(d if asked and d is not None else empty for d, asked in zip(found, rest[-3:], strict=True))


def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, v, weight, bias, *ctx.grid = inputs
    ctx.save_for_backward(v, weight, bias)


def differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    fused.refuse_graph("local branch")
    v, weight, bias = ctx.saved_tensors
    of_base, *wanted = ctx.needs_input_grad[:4]
    found = torch.ops.linvit.local_filter_backward(grad, v, weight, bias, *ctx.grid, *wanted)
    d_rest = (d if asked else None for d, asked in zip(found, wanted, strict=True))
    return grad if of_base else None, *d_rest, None, None, None


for device in ("CUDA", "CPU"):
    library.impl("local_filter", run, device)
    library.impl("local_filter_backward", run_backward, device)
for op, passes in ((torch.ops.linvit.local_filter, 1), (torch.ops.linvit.local_filter_backward, 2)):
    register_flop_formula(op)(
        lambda _, v, weight, bias, height, width, prefix, *rest, passes=passes, **__: (
            passes * flops(v, weight, Grid(height, width, prefix))
        )
    )
torch.library.register_fake("linvit::local_filter", lambda base, v, *_: rows_like(v), lib=library)
torch.library.register_fake("linvit::local_filter_backward", fake_backward, lib=library)
torch.library.register_autograd("linvit::local_filter", differentiate, setup_context=setup, lib=library)
