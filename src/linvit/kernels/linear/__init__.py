"""Linear attention as one op, forward and backward: `linear_attention(q, k, v, formula)`, linvit::linear_attention.

Where one program serves a head, forward reads q, k and v and writes the output, and backward reads q, k, v and the
output's gradient and writes dq, dk and dv: eleven tensors in all. Between them lies a state of head_dim² numbers for
each head. With few tokens that is more than softmax saves, and backward reads k and v once more instead.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.kernels import fused, local
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
from linvit.kernels.linear.layout import (
    FEATURES,
    MOST_FILTERED,
    OVER_TOKENS,
    WIDEST,
    Formula,
    Layout,
    keeps_state,
    layout_of,
    split_of,
)
from linvit.kernels.operators import register

__all__ = ["WIDEST", "Formula", "linear_attention", "op", "why_not"]


@dataclass(frozen=True)
class Launches:
    """One direction's launches for one signature: by phase, and the sum of partial states between."""

    phases: tuple[Launch, ...]
    add: Launch | None
    programs: int
    chunks: int
    layout: Layout
    saves: bool
    filters: bool  # along the tokens, too

    @property
    def split(self) -> bool:
        return len(self.phases) > 1

    def empty_state(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for a state and for its partial ones, which is the same where there is one of them."""
        state = torch.empty((self.programs, self.layout.numbers), dtype=torch.float32, device=device)
        return state, state if self.add is None else state.new_empty(self.chunks, *state.shape)


class Beside(NamedTuple):
    """Of the tensors beside q, k and v what launches depend on."""

    mask: Strides | None
    turn: Strides  # of the cosines and sines: batch, heads, tokens, pairs; and how many tokens have one
    near: Strides  # of a filter along the tokens: heads, taps; and how many taps it has
    dtypes: tuple[torch.dtype | None, ...]

    @classmethod
    def of(cls, given: Given, formula: Formula) -> "Beside":
        mask, cos, _, constant, weight, bias = given
        turn: Strides = (0, 0, 0, 0, 0)
        if cos is not None:
            shape, strides = (1,) * (4 - cos.ndim) + cos.shape, (0,) * (4 - cos.ndim) + cos.stride()
            batch, heads = (stride if size > 1 else 0 for size, stride in zip(shape[:2], strides[:2], strict=True))
            turn = (batch, heads, strides[2], strides[3] * (2 if formula.turn == "pairs" else 1), shape[2])
        near = None if weight is None else local.along_tokens(weight, bias, grid_of(formula))
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (cos, constant, weight))
        return cls(None if mask is None else mask.stride(), turn, near or (0, 0, 0), dtypes)


@launch_cache
def prepare(
    what: str, signature: tuple[Any, ...], formula: Formula, beside: Beside, saves: bool,
    grad_strides: Strides = (), d_strides: tuple[Strides, ...] = (), wanted: bool = False,
) -> Launches:  # fmt: skip
    """Launches for tensors of this signature: "forward", "backward" or the "state" alone.

    `grad_strides` are those of the output's gradient, `d_strides` those of dq, dk and dv; `wanted` is the constant's.
    """
    from linvit.kernels.linear import kernels

    q, k, v, *strides, dtype, _, _, device, _, _ = signature
    (batch, heads, queries, head_dim), keys, value_dim = q, v[2], v[3]
    layout = layout_of(heads, head_dim, value_dim, dtype.itemsize, shared_memory(device))
    programs = layout.programs(batch, heads)
    sizes = (queries, keys, processors(device), shared_memory(device), dtype)
    how = split_of(layout, programs, *sizes, formula, backward=what == "backward")
    kernel = kernels.forward_kernel
    if what == "backward":
        from linvit.kernels.linear.gradients import backward_kernel as kernel

        parts = tuple(part_strides(layout, *of) for of in zip((q, k), d_strides[:2], strict=True))
        strides += (grad_strides, *(part[1:] for part in parts), d_strides[2][:3])
        apart = tuple(part[0] for part in parts)
    else:
        strides.append((queries * heads * value_dim, value_dim, heads * value_dim, 1))
        apart = ()
    if what == "state":
        how = replace(how, phases=("keys",))
    columns = (layout.key_width + layout.key_rest, layout.value_width + layout.value_rest, heads % layout.group)
    padded = (columns[0], columns[1] * layout.value_blocks, columns[2]) != (head_dim, value_dim, 0)
    *turn, turned = beside.turn
    *near, taps = beside.near if layout.group <= MOST_FILTERED and what == "forward" else (0, 0, 0)
    unit, steps = in_units(dtype.itemsize, *strides)
    values = (
        *steps, *apart, *(beside.mask or (0, 0)), *turn, *near,
        *(heads, queries, keys, queries - turned, how.query_chunk, how.key_chunk),
        *(formula.scale, formula.eps, max(formula.feature_eps, fused.LEAST), formula.own),
        max(formula.norm_eps, fused.LEAST),
    )  # fmt: skip
    constants = (
        *(formula.feature, formula.row_sum, formula.clamp, formula.squared, formula.own != 0, formula.norm),
        *(formula.turn, taps, head_dim, value_dim, layout.group, layout.key_width, layout.key_rest),
        *(layout.value_width, layout.value_rest, layout.value_blocks, how.block),
        *(how.block if formula.turn else how.state_block, unit, padded),
        *fused.operands(dtype, device.type == "cpu"),
    )
    options = {"num_warps": how.num_warps, "num_stages": how.num_stages, "maxnreg": how.registers}
    grid = (programs, how.chunks, 1)
    phases = tuple(Launch(kernel, grid, (*values, phase, *constants), **options) for phase in how.phases)
    add = None
    if how.phases != ("both",) and how.chunks > 1:
        size = programs * layout.numbers
        add = Launch(kernels.add_partials, (-(-size // 128), 1, 1), (how.chunks, size, 16, 128))
    saves = saves and keeps_state(layout, heads, queries)
    return Launches(phases, add, programs, how.chunks, layout, saves, taps > 0)


def state_sizes(q: Tensor, v: Tensor, formula: Formula) -> tuple[tuple[int, ...]]:
    """The size of what forward saves, zero where it is nothing."""
    batch, heads, queries, head_dim = q.shape
    layout = layout_of(int(heads), int(head_dim), int(v.shape[3]), q.dtype.itemsize, shared_memory(q.device))
    return ((layout.programs(batch, heads), layout.numbers) if keeps_state(layout, heads, queries) else (0,),)


def part_strides(layout: Layout, shape: torch.Size, strides: Strides) -> Strides:
    """Strides of a gradient's parts, one per block of values and dense; a single part is the gradient itself."""
    _, heads, tokens, dim = shape
    if layout.value_blocks == 1:
        return (0, *strides[:3])
    return (shape.numel(), heads * tokens * dim, tokens * dim, dim)


def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Given, formula: Formula, save: bool, signature: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None]:
    """The output, as a (batch, heads, queries, value_dim) view of (batch, queries, heads, value_dim), and the state."""
    *beside, weight, bias = given
    how = prepare("forward", signature, formula, Beside.of(given, formula), save)
    out, state = rows_like(v, q.shape[2]), None
    beside.append(weight if how.filters else None)
    shift = shift_of(k, given[0], formula) if how.split or how.saves else None
    if how.saves or how.split:
        state = run_keys(how, q, k, v, out, beside, shift)
    if how.split or state is None:
        how.phases[-1](q, k, v, out, *beside, shift, state)
    if weight is not None and not how.filters:
        local.forward(v, weight, bias, grid_of(formula), out, out)
    return out, state if how.saves else None


def grid_of(formula: Formula) -> local.Grid:
    return local.Grid(formula.height, formula.width, formula.prefix)


def shift_of(k: Tensor, mask: Tensor | None, formula: Formula) -> Tensor | None:
    """What a softmax over tokens subtracts from its exponents: the largest of each channel, dense; otherwise None.

    A program that reads all keys finds what to subtract itself, unless another one has to know it, too.
    """
    if formula.feature not in OVER_TOKENS:
        return None
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], float("-inf"))
    return k.amax(2).contiguous()


def run_keys(
    how: Launches, q: Tensor, k: Tensor, v: Tensor, out: Tensor, beside: list[Tensor | None], shift: Tensor | None
) -> Tensor:
    """The first of the forward launches, and the state that it leaves."""
    state, partial = how.empty_state(q.device)
    how.phases[0](q, k, v, out, *beside, shift, partial)
    if how.add is not None:
        how.add(partial, state)
    return state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, given: Given,
    saved: list[Tensor | None], formula: Formula, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Writes dq, dk and dv, whose last dimension is dense; returns the gradients of the learned that are wanted."""
    (state,), (*beside, weight, bias) = saved, given
    constant = beside[-1]
    signature, d_strides = signature_of(q, k, v), (dq.stride(), dk.stride(), dv.stride())
    kinds, of_constant = Beside.of(given, formula), constant is not None and wanted[0]
    how = prepare("backward", signature, formula, kinds, state is None, grad.stride(), d_strides, of_constant)
    shift = shift_of(k, given[0], formula) if how.split or state is not None else None
    if state is None and how.split:
        state = run_keys(prepare("state", signature, formula, kinds, True), q, k, v, grad, [*beside, None], shift)
    dq_parts, dk_parts = dq, dk
    blocks = how.layout.value_blocks
    if blocks > 1:
        dq_parts, dk_parts = (d.new_empty(blocks, *d.shape, dtype=torch.float32) for d in (dq, dk))
    d_state, partial = how.empty_state(q.device) if how.split else (None, None)
    d_constant = q.new_empty(how.programs, dtype=torch.float32) if of_constant else None
    for launch, where in zip(how.phases, (partial, d_state), strict=False):
        launch(q, k, v, grad, dq_parts, dk_parts, dv, *beside, d_constant, shift, state, where)
        if how.add is not None and where is partial:
            how.add(partial, d_state)
    if blocks > 1:
        dq.copy_(dq_parts.sum(0))
        dk.copy_(dk_parts.sum(0))
    d_local: tuple[Tensor | None, ...] = (None, None)
    if weight is not None:
        d_local = local.gradients(grad, v, weight, bias, grid_of(formula), dv, wanted[1:])
    if d_constant is None or constant is None:
        return None, *d_local
    return d_constant.sum().to(constant.dtype).reshape(constant.shape), *d_local


def why_not(q: Tensor, k: Tensor, v: Tensor, formula: Formula) -> str | None:
    """Why the kernel cannot serve these tensors, or None where it can."""
    why = fused.unserved(q, k, v)
    if why is not None:
        return why
    head_dim, value_dim, size = q.shape[3], v.shape[3], q.dtype.itemsize
    if formula.feature not in FEATURES:
        return f"there is no kernel for the feature map '{formula.feature}'"
    if head_dim > WIDEST[size] or value_dim > WIDEST[2]:
        return f"features of {head_dim} or values of {value_dim} channels are too wide for {q.dtype}"
    if formula.row_sum and formula.feature in OVER_TOKENS:
        return "a softmax over tokens is divided already, the kernel cannot divide by a row sum as well"
    if formula.own and q.shape[2] != k.shape[2]:
        return "the term with the query's own value needs as many keys as queries"
    if formula.norm and layout_of(q.shape[1], head_dim, value_dim, size, shared_memory(q.device)).value_blocks > 1:
        return f"values of {value_dim} channels are too wide for the fused output norm"
    return None


def why_not_turned(cos: Tensor | None, sin: Tensor | None, formula: Formula) -> str | None:
    """The same of the cosines and sines of rotary position, where there are any."""
    if cos is None or sin is None:
        return None
    if formula.feature in OVER_TOKENS:
        return "a softmax over tokens divides each channel before rotary position mixes them"
    if cos.requires_grad or sin.requires_grad:
        return "it has no gradient for rotary position that is learned"
    if cos.stride() != sin.stride() or cos.dtype not in fused.DTYPES or cos.dtype != sin.dtype or cos.ndim > 4:
        return "cosines and sines of rotary position are not laid out alike"
    return None


def flops(q: torch.Size, v: torch.Size, formula: Formula, given: Any) -> int:
    """Two per multiply-accumulate of the two products, the row sum and a filter, as in the plain reference."""
    batch, heads, queries, head_dim = q
    weight = given[-2]
    filtered = 0 if weight is None else local.flops(v, weight, grid_of(formula))
    return filtered + 2 * batch * heads * head_dim * ((queries + v[2]) * v[3] + (queries if formula.row_sum else 0))


op = register(
    fused.FusedOp(
        "linear_attention", Formula, forward, backward,
        flops=flops, constants=("mask", "cos", "sin"), learned=("constant", "weight", "bias"), saved=("state",),
        saved_sizes=state_sizes, lazy=True,
    )
)  # fmt: skip


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None, *,
    turn: tuple[Tensor | None, Tensor | None] = (None, None),
    filters: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part; `constant` is a scalar that the formula adds to
    every product of a query and a key. `turn` are the cosines and sines of rotary position, `filters` weight and bias
    of a local branch over the formula's grid, as in `linvit.kernels.local`.
    """
    return op(q, k, v, (mask, *turn, constant, *filters), formula)
