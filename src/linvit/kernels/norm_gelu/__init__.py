"""Linear attention plus GELU(BatchNorm(v)), the norm shared by the heads, as one op: linvit::linear_norm_gelu.

One launch adds the shortcut to what the linear core wrote, and backward adds to the core's dv: nothing of full size is
made or kept beside v. In training `batch_moments` comes before it, linvit::batch_moments, an op of its own because it
updates the running statistics. Its mean and variance count as functions of v in the backward of the first. Sums are in
float32 and in fixed order: the same inputs give the same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from linvit.kernels import fused, linear
from linvit.kernels.fused import Given, Launch, Strides, in_units, launch_cache, plain, power_of_two, processors
from linvit.kernels.linear import Formula
from linvit.kernels.operators import library, register

ADD_TILE, SUM_TILE = 4096, 2048  # numbers of a tile; two sums of each are held
PARTIALS, CHANNELS = 512, 8  # partial sums and channels that a program adds up at a time
Dtypes = tuple[torch.dtype | None, ...]


class Options(NamedTuple):
    """The linear core's formula, which divides by the row sum, and the norm."""

    feature: str
    eps: float
    feature_eps: float
    squared: bool
    turn: str
    norm_eps: float
    own: bool  # mean and variance are those of v, not fixed ones

    @property
    def formula(self) -> Formula:
        eps, feature_eps, squared, turn = self[1:5]
        return Formula(self.feature, True, eps=eps, feature_eps=feature_eps, squared=squared, turn=turn)


class Norm(NamedTuple):
    """A BatchNorm: what it takes from each channel, what it divides by the root of, its parameters and its eps."""

    mean: Tensor
    var: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    own: bool  # see Options


class Rows(NamedTuple):
    """Tokens of all images, and the channels of all heads: `(rows, heads · dim)`, in blocks of columns."""

    tokens: int
    rows: int
    heads: int
    dim: int

    @classmethod
    def of(cls, v: Tensor) -> "Rows":
        batch, heads, tokens, dim = v.shape
        return cls(tokens, batch * tokens, heads, dim)

    @property
    def columns(self) -> int:
        return self.heads * self.dim

    def tile(self, numbers: int) -> tuple[int, int, int]:
        """Blocks of columns, columns of each, and rows of a tile of so many numbers. Little is padded, and lines are
        read in wide pieces: a block costs as if it had 16 columns more."""
        width = min((128, 64, 32, 16), key=lambda width: -(-self.columns // width) * (width + 16))
        return -(-self.columns // width), width, numbers // width

    def split(self, device: torch.device) -> tuple[int, int]:
        """Into how many chunks of how many rows sums are split."""
        blocks, _, block = self.tile(SUM_TILE)
        wanted = max(1, min(-(-self.rows // block), 3 * processors(device) // blocks))
        chunk = -(-self.rows // (wanted * block)) * block
        return -(-self.rows // chunk), chunk


def dtypes_of(*tensors: Tensor | None) -> Dtypes:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


@launch_cache
def prepare_moments(
    rows: Rows, v: Strides, dtypes: Dtypes, momentum: float | None, device: torch.device
) -> tuple[Launch, Launch, tuple[int, int, int]]:
    """The launches of the partial sums and of their sum, and the shape of the first."""
    from linvit.kernels.norm_gelu import kernels

    (parts, chunk), (blocks, width, block) = rows.split(device), rows.tile(SUM_TILE)
    unit, strides = in_units(dtypes[0].itemsize if dtypes[0] else 1, v)
    values: tuple[Any, ...] = (*strides, rows.tokens, rows.rows, chunk, rows.columns, unit, rows.dim, width, block)
    first = Launch(kernels.moments_kernel, (parts, blocks, 1), values, num_warps=4)
    values = (v[3], parts, rows.rows, chunk, float(momentum or 0), rows.heads, momentum is None)
    values += tile_of_sums(rows, parts)
    second = Launch(kernels.add_moments, (-(-rows.dim // CHANNELS), 1, 1), values, num_warps=4)
    return first, second, (parts, 2, rows.columns)


def tile_of_sums(rows: Rows, parts: int) -> tuple[int, int, int]:
    return rows.dim, CHANNELS, min(PARTIALS, power_of_two(parts * rows.heads))


@launch_cache
def prepare_add(rows: Rows, v: Strides, out: Strides, dtypes: Dtypes, eps: float, device: torch.device) -> Launch:
    """`dtypes` and the device: a launch is compiled for them."""
    from linvit.kernels.norm_gelu import kernels

    blocks, width, block = rows.tile(ADD_TILE)
    unit, strides = in_units(dtypes[0].itemsize if dtypes[0] else 1, v, out)
    values = (*strides, rows.tokens, rows.rows, eps, rows.columns, unit, rows.dim, width, block)
    return Launch(kernels.add_kernel, (-(-rows.rows // block) * blocks, 1, 1), values, num_warps=4)


@launch_cache
def prepare_gradient(
    rows: Rows, v: Strides, grad: Strides, dv: Strides, dtypes: Dtypes, options: Options, sums: bool, adds: bool,
    device: torch.device,
) -> tuple[Launch, Launch, tuple[int, int, int]]:  # fmt: skip
    """The launch, that of its partial sums' sum, and their shape."""
    from linvit.kernels.norm_gelu import kernels

    blocks, width, block = rows.tile(SUM_TILE)
    parts, chunk = rows.split(device) if sums else (-(-rows.rows // block), block)
    unit, strides = in_units(dtypes[0].itemsize if dtypes[0] else 1, v, grad, dv)
    share = 1 / (rows.rows * rows.heads) if options.own else 0.0
    values = (*strides, rows.tokens, rows.rows, chunk, options.norm_eps, share, sums, adds)
    values += (rows.columns, unit, rows.dim, width, block)
    launch = Launch(kernels.gradient_kernel, (parts, blocks, 1), values, num_warps=4)
    values = (parts, rows.heads, *tile_of_sums(rows, parts))
    total = Launch(kernels.add_gradients, (-(-rows.dim // CHANNELS), 1, 1), values, num_warps=4)
    return launch, total, (parts, 2, rows.columns)


def take_moments(
    v: Tensor, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float | None
) -> tuple[Tensor, Tensor]:
    """The mean and variance of each channel over all else, and the running ones updated as nn.BatchNorm does: without a
    momentum they are the means of all batches."""
    rows, running = Rows.of(v), (running_mean, running_var, batches)
    if momentum is None and batches is not None:
        batches.add_(1)  # before anybody divides by it
    if momentum is None and batches is None:
        momentum = 0.0
    first, second, shape = prepare_moments(rows, v.stride(), dtypes_of(v, *running), momentum, v.device)
    partial = torch.empty(shape, dtype=torch.float32, device=v.device)
    mean, var = (torch.empty(rows.dim, dtype=torch.float32, device=v.device) for _ in range(2))
    first(v, partial)
    second(partial, v, mean, var, *running)
    increment_version([tensor for tensor in running if tensor is not None and not tensor.is_inference()])
    return mean, var


def add(v: Tensor, out: Tensor, norm: Given, options: Options) -> None:
    """out += GELU(BatchNorm(v)); `norm` is its mean, variance, weight and bias."""
    dtypes = dtypes_of(v, out, *norm)
    launch = prepare_add(Rows.of(v), v.stride(), out.stride(), dtypes, options.norm_eps, v.device)
    launch(v, out, *norm)


def add_gradient(
    grad: Tensor, v: Tensor, dv: Tensor, norm: Given, options: Options, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Adds to dv, and returns the gradients of weight and bias."""
    _, _, weight, bias = norm
    assert weight is not None and bias is not None
    found = tuple(torch.empty_like(weight, dtype=torch.float32) for _ in range(2))
    none: Given = (None, None)
    passes = [(True, not options.own)] if options.own or any(wanted) else []
    if options.own or not passes:
        passes.append((False, True))
    for sums, adds in passes:
        of_sums = found if options.own and adds else none
        key = (Rows.of(v), v.stride(), grad.stride(), dv.stride(), dtypes_of(v, grad, dv, *norm, *of_sums))
        launch, total, shape = prepare_gradient(*key, options, sums, adds, v.device)
        partial = torch.empty(shape, dtype=torch.float32, device=v.device) if sums else None
        launch(v, grad, dv, *norm, partial, *of_sums)
        if sums:
            total(partial, *found)
    d_weight, d_bias = (d.to(of.dtype) for d, of in zip(found, (weight, bias), strict=True))
    return d_weight if wanted[0] else None, d_bias if wanted[1] else None


def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options, save: bool, signature: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None]:
    """The output, and the linear core's state."""
    mask, cos, sin, mean, var, constant, weight, bias = given
    out, state = linear.forward(q, k, v, (mask, cos, sin, constant, None, None), options.formula, save, signature)
    add(v, out, (mean, var, weight, bias), options)
    return out, state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, given: Given,
    saved: list[Tensor | None], options: Options, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Writes dq, dk and dv; returns the gradients of the constant and of the norm's weight and bias."""
    mask, cos, sin, mean, var, constant, weight, bias = given
    asked = (wanted[0], False, False)
    core = linear.backward(
        grad, q, k, v, dq, dk, dv, (mask, cos, sin, constant, None, None), saved, options.formula, asked
    )
    return core[0], *add_gradient(grad, v, dv, (mean, var, weight, bias), options, wanted[1:])


op = register(
    fused.FusedOp(
        "linear_norm_gelu", Options, forward, backward,
        flops=lambda q, v, options, given: linear.flops(q, v, options.formula, (None,) * 6),
        constants=("mask", "cos", "sin", "mean", "var"), learned=("constant", "weight", "bias"), saved=("state",),
        saved_sizes=lambda q, v, options: linear.state_sizes(q, v, options.formula), lazy=True,
    )
)  # fmt: skip

library.define(
    "batch_moments(Tensor v, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, float? momentum)"
    " -> (Tensor, Tensor)"
)
for device in ("CUDA", "CPU"):
    library.impl("batch_moments", take_moments, device)
torch.library.register_fake(
    "linvit::batch_moments",
    lambda v, *_: tuple(v.new_empty(v.shape[3], dtype=torch.float32) for _ in range(2)),
    lib=library,
)
torch.utils.flop_counter.register_flop_formula(torch.ops.linvit.batch_moments)(lambda *_, **__: 0)


def batch_moments(
    v: Tensor, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float | None
) -> tuple[Tensor, Tensor]:
    """See `take_moments`; the gradients of what comes of v through them are those of `op` with `own`."""
    v = v.detach()
    run = take_moments if plain(v) else torch.ops.linvit.batch_moments
    return run(v, running_mean, running_var, batches, momentum)  # type: ignore[no-any-return]


def why_not_norm(v: Tensor, *norm: Tensor | None) -> str | None:
    """Why the kernels cannot serve a norm of these running statistics and parameters, or None where they can."""
    for tensor in norm:
        if tensor is not None and (tensor.dtype not in fused.DTYPES or tensor.device != v.device):
            return f"the norm is {tensor.dtype} on {tensor.device} and the values are on {v.device}"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, norm: Norm, mask: Tensor | None = None,
    constant: Tensor | None = None, turn: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Linear attention, divided by the row sum, plus GELU(BatchNorm(v)); see `linear_attention`."""
    options = Options(
        formula.feature, formula.eps, formula.feature_eps, formula.squared, formula.turn, norm.eps, norm.own
    )
    return op(q, k, v, (mask, *turn, norm.mean, norm.var, constant, norm.weight, norm.bias), options)
