"""Launching linear attention's kernels: allocates what they write and passes tensors as pointers and strides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from linvit.kernels.linear_plan import Formula, Layout, layout_of, plan


class Launch:
    """A kernel with all its arguments but the pointers.

    Triton looks at every argument of every call to pick the compiled kernel, which takes longer than a small kernel
    runs. All but the pointers is the same in calls of the same shapes and strides, so that is done once.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], values: tuple[Any, ...], warps: int, stages: int
    ) -> None:
        self.kernel, self.grid, self.values = kernel, grid, values
        self.options = {"num_warps": warps, "num_stages": stages}
        self.ready: Any = None

    def __call__(self, *pointers: Tensor | None) -> None:
        aligned = all(p is None or p.data_ptr() % 16 == 0 for p in pointers)
        if aligned and self.ready is not None:
            self.ready(*pointers, *self.values)
            return
        compiled = self.kernel[self.grid](*pointers, *self.values, **self.options)
        if aligned and compiled is not None:  # the interpreter compiles nothing
            self.ready = compiled[self.grid]


@dataclass(frozen=True)
class Launches:
    """One direction's launches for one set of shapes and strides: by phase, and the sum of partial states between."""

    phases: tuple[tuple[str, Launch], ...]
    add: Launch | None
    programs: int
    chunks: int
    layout: Layout

    @property
    def split(self) -> bool:
        return len(self.phases) > 1


def operands(dtype: torch.dtype, interpreted: bool) -> tuple[Any, Any, str]:
    """Types of the matrix products' operands: of k and v, and of those with states and gradients; and the precision.

    Sums are in float32 always. float16 has too small a range for states and gradients, so products with those run in
    tf32, which holds every float16. float32 runs as three tf32 products, which comes to float32's accuracy. Triton's
    interpreter cannot multiply bfloat16.
    """
    import triton.language as tl

    if dtype == torch.float32:
        return tl.float32, tl.float32, "tf32x3"
    if dtype == torch.float16:
        return tl.float16, tl.float32, "tf32"
    kind = tl.float32 if interpreted else tl.bfloat16
    return kind, kind, "tf32"


@lru_cache(maxsize=4096)
def prepare(
    backward: bool, q: torch.Size, k: torch.Size, v: torch.Size, strides: tuple[int, ...], dtype: torch.dtype,
    device: torch.device, formula: Formula, given: tuple[Any, ...],
) -> Launches:  # fmt: skip
    """Launches for tensors of these shapes, and strides in the order the kernels take them.

    `given` says which optional tensors there are: each set of them is a kernel of its own.
    """
    from linvit.kernels import linear_kernels as kernels

    (batch, heads, queries, head_dim), keys, value_dim = q, v[2], v[3]
    layout = layout_of(heads, head_dim, value_dim, dtype.itemsize)
    programs = layout.programs(batch, heads)
    how = plan(layout, programs, queries, keys, processors(device), dtype.itemsize, backward)
    padded = (
        layout.key_width != head_dim
        or layout.value_width * layout.value_blocks != value_dim
        or heads % layout.group != 0
    )
    numbers: tuple[Any, ...] = (heads, queries, keys, how.query_chunk, how.key_chunk)
    numbers += (formula.scale, formula.eps, formula.feature_eps, formula.own, formula.norm_eps)
    constants: tuple[Any, ...] = (
        formula.feature,
        formula.row_sum,
        formula.clamp,
        formula.own != 0,
        formula.norm,
        head_dim,
        value_dim,
    )
    constants += (layout.group, layout.key_width, layout.value_width, layout.value_blocks, how.block, padded)
    constants += operands(dtype, device.type == "cpu")
    kernel = kernels.backward_kernel if backward else kernels.forward_kernel
    grid = (programs, how.chunks, 1)
    phases = tuple(
        (phase, Launch(kernel, grid, (*strides, *numbers, phase, *constants), how.num_warps, how.num_stages))
        for phase in how.phases
    )
    add = None
    if len(phases) > 1 and how.chunks > 1:
        size = programs * layout.numbers
        add = Launch(kernels.add_partials, (-(-size // 128), 1, 1), (how.chunks, size, 16, 128), 4, 1)
    return Launches(phases, add, programs, how.chunks, layout)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, formula: Formula, save: bool
) -> tuple[Tensor, Tensor | None]:
    """The output, as a (batch, heads, queries, value_dim) view of (batch, queries, heads, value_dim), and the state."""
    batch, heads, queries, _ = q.shape
    out = torch.empty((batch, queries, heads, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)
    strides = q.stride() + k.stride() + v.stride() + out.stride() + (mask.stride() if mask is not None else (0, 0))
    given = (mask is None, None if constant is None else constant.dtype, save)
    how = prepare(False, q.shape, k.shape, v.shape, strides, q.dtype, q.device, formula, given)
    state = partial = None
    if save or how.split:
        state = partial = torch.empty((how.programs, how.layout.numbers), dtype=torch.float32, device=q.device)
        if how.add is not None:
            partial = state.new_empty(how.chunks, *state.shape)
    for phase, launch in how.phases:
        launch(q, k, v, out, mask, constant, partial if phase == "keys" else state)
        if phase == "keys" and how.add is not None:
            how.add(partial, state)
    return out, state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, state: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, formula: Formula,
) -> Tensor | None:  # fmt: skip
    """Writes dq, dk and dv, whose last dimension is dense; returns the constant's gradient."""
    blocks = layout_of(q.shape[1], q.shape[3], v.shape[3], q.dtype.itemsize).value_blocks
    dq_parts, dk_parts = dq, dk
    if blocks > 1:
        dq_parts, dk_parts = (torch.empty((blocks, *d.shape), dtype=torch.float32, device=d.device) for d in (dq, dk))
    of_parts = tuple(((0, *d.stride()) if blocks == 1 else d.stride())[:4] for d in (dq_parts, dk_parts))
    strides = q.stride() + k.stride() + v.stride() + grad.stride() + of_parts[0] + of_parts[1] + dv.stride()[:3]
    strides += mask.stride() if mask is not None else (0, 0)
    given = (mask is None, None if constant is None else constant.dtype)
    how = prepare(True, q.shape, k.shape, v.shape, strides, q.dtype, q.device, formula, given)
    d_state = partial = None
    if how.split or constant is not None:
        d_state = partial = torch.empty_like(state)
    if how.add is not None:
        partial = state.new_empty(how.chunks, *state.shape)
    for phase, launch in how.phases:
        where = partial if phase == "queries" else d_state
        launch(q, k, v, grad, dq_parts, dk_parts, dv, mask, constant, state, where)
        if phase == "queries" and how.add is not None:
            how.add(partial, d_state)
    if blocks > 1:
        dq.copy_(dq_parts.sum(0))
        dk.copy_(dk_parts.sum(0))
    if constant is None or d_state is None:
        return None
    values = how.layout.group * how.layout.value_width
    sums, d_sums = state[:, -2 * values :], d_state[:, -2 * values :]
    by_value = (sums[:, :values] * d_sums[:, :values]).sum()
    by_count = (sums[:, values] * d_sums[:, values:].sum(1)).sum() / how.layout.value_width
    return (by_value + by_count if formula.row_sum else by_value).to(constant.dtype)


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `(batch, heads, tokens, head_dim)` as views of a packed `(batch, tokens, 3, heads, head_dim)`."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def empty_like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape, tokens outside and heads inside: the layout that projections have."""
    batch, heads, tokens, dim = tensor.shape
    return tensor.new_empty((batch, tokens, heads, dim)).transpose(1, 2)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, state: Tensor,
    formula: Formula,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    return dq, dk, dv, backward(grad, q, k, v, mask, constant, state, dq, dk, dv, formula)


def packed_gradient(
    grad: Tensor, qkv: Tensor, mask: Tensor | None, constant: Tensor | None, state: Tensor, formula: Formula
) -> tuple[Tensor, Tensor | None]:
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_constant = backward(grad, *unpack(qkv), mask, constant, state, *unpack(d_qkv), formula)
    return d_qkv, d_constant
