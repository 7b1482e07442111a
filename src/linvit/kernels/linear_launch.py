"""Launching linear attention's kernels: allocates what they write and passes tensors as pointers and strides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from linvit.kernels.linear_plan import Formula, Layout, layout_of, plan

OVER_TOKENS = ("softmax", "key_softmax")  # feature maps whose keys are a softmax over tokens


class Launch:
    """A kernel with all its arguments but the pointers.

    Triton looks at every argument of every call to pick the compiled kernel, which takes longer than a small kernel
    runs. All but the pointers is the same in calls of the same shapes and strides, so that is done once. Launch hooks,
    Triton's own for profilers, are not called.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], values: tuple[Any, ...], **options: int | None) -> None:
        self.kernel, self.grid, self.values, self.options = kernel, grid, values, options
        self.compiled: Any = None
        self.run: Any = None
        self.ready: tuple[Any, Any] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        assert tensors[0] is not None
        index = tensors[0].get_device()  # Triton launches on the current device, wherever the tensors are
        if index >= 0 and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(*tensors)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = True
        for pointer in pointers:
            if pointer is not None and pointer % 16:
                aligned = False
        if aligned and self.ready is not None:
            stream = torch._C._cuda_getCurrentRawStream(index)
            return self.run(*self.grid, stream, *self.ready, None, None, None, *pointers, *self.values)
        compiled = self.kernel[self.grid](*tensors, *self.values, **self.options)
        if aligned and compiled is not None:  # the interpreter compiles nothing
            self.run, self.compiled = compiled.run, compiled
            self.ready = (compiled.function, compiled.packed_metadata)
        return None


@dataclass(frozen=True)
class Launches:
    """One direction's launches for one set of shapes and strides: by phase, and the sum of partial states between."""

    phases: tuple[Launch, ...]
    add: Launch | None
    programs: int
    chunks: int
    layout: Layout
    saves: bool

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


def prepare(
    what: str, q: Tensor, k: Tensor, v: Tensor, strides: tuple[int, ...], mask: Tensor | None, formula: Formula,
    saves: bool = False,
) -> Launches:  # fmt: skip
    """Launches for tensors like these: "forward", "backward" or the "state" alone.

    `strides` are those of the kernel's other tensors, in its order.
    """
    from linvit.kernels import linear_kernels as kernels

    (batch, heads, queries, head_dim), keys, value_dim = q.shape, v.shape[2], v.shape[3]
    layout = layout_of(heads, head_dim, value_dim, q.dtype.itemsize)
    programs = layout.programs(batch, heads)
    sizes = (queries, keys, processors(q.device), q.dtype.itemsize)
    sums = formula.row_sum or formula.feature in OVER_TOKENS
    how = plan(layout, programs, *sizes, row_sum=sums, backward=what == "backward")
    if what == "state":
        how = replace(how, phases=("keys",))
    padded = (
        layout.key_width != head_dim
        or layout.value_width * layout.value_blocks != value_dim
        or heads % layout.group != 0
    )
    values = (
        *(q.stride() + k.stride() + v.stride() + strides + (mask.stride() if mask is not None else (0, 0))),
        *(heads, queries, keys, how.query_chunk, how.key_chunk),
        *(formula.scale, formula.eps, formula.feature_eps, formula.own, formula.norm_eps),
    )
    constants = (
        *(formula.feature, formula.row_sum, formula.clamp, formula.own != 0, formula.norm, head_dim, value_dim),
        *(layout.group, layout.key_width, layout.value_width, layout.value_blocks, how.block, padded),
        *operands(q.dtype, q.device.type == "cpu"),
    )
    kernel = kernels.backward_kernel if what == "backward" else kernels.forward_kernel
    grid = (programs, how.chunks, 1)
    options = {"num_warps": how.num_warps, "num_stages": how.num_stages, "maxnreg": how.registers}
    phases = tuple(Launch(kernel, grid, (*values, phase, *constants), **options) for phase in how.phases)
    add = None
    if how.phases != ("both",) and how.chunks > 1:
        size = programs * layout.numbers
        add = Launch(kernels.add_partials, (-(-size // 128), 1, 1), (how.chunks, size, 16, 128))
    return Launches(phases, add, programs, how.chunks, layout, saves)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class Remembered(dict[tuple[Any, ...], Launches]):
    """Launches by everything they depend on. Not for ever: a service may see any number of shapes."""

    def __setitem__(self, key: tuple[Any, ...], value: Launches) -> None:
        if len(self) >= 4096:
            self.clear()
        super().__setitem__(key, value)


remembered = Remembered()


def sort_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Everything about q, k and v that a launch depends on."""
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    return (*shapes, *strides, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)


def keeps_state(q: Tensor, v: Tensor) -> bool:
    """Whether forward saves the state for backward, which computes it again otherwise.

    It does where that takes no more memory than the row sums that softmax saves: a float32 number for each query. Below
    that many tokens k and v are often still in the cache when backward reads them once more.
    """
    (_, heads, queries, head_dim), value_dim = q.shape, v.shape[3]
    layout = layout_of(int(heads), int(head_dim), int(value_dim), q.dtype.itemsize)
    return bool(layout.programs(1, heads) * layout.numbers <= heads * queries)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, formula: Formula, save: bool,
    sort: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output, as a (batch, heads, queries, value_dim) view of (batch, queries, heads, value_dim), and the state."""
    batch, heads, queries, _ = q.shape
    out = empty_rows(batch, heads, queries, v.shape[3], q)
    key: tuple[Any, ...] = (sort or sort_of(q, k, v), formula, save)
    if mask is not None or constant is not None:
        key += (None if mask is None else mask.stride(), None if constant is None else constant.dtype)
    how = remembered.get(key)
    if how is None:
        how = remembered[key] = prepare("forward", q, k, v, out.stride(), mask, formula, save and keeps_state(q, v))
    shift = shift_of(k, mask, formula)
    if how.saves or how.split:
        state = run_keys(how, q, k, v, out, mask, constant, shift)
        if how.split:
            how.phases[1](q, k, v, out, mask, constant, shift, state)
        return out, state if how.saves else None
    how.phases[0](q, k, v, out, mask, constant, shift, None)
    return out, None


def shift_of(k: Tensor, mask: Tensor | None, formula: Formula) -> Tensor | None:
    """What a softmax over tokens subtracts from its exponents: the largest of each channel, dense; otherwise None."""
    if formula.feature not in OVER_TOKENS:
        return None
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], float("-inf"))
    return k.amax(2).contiguous()


def run_keys(
    how: Launches, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, constant: Tensor | None,
    shift: Tensor | None,
) -> Tensor:  # fmt: skip
    """The first of the forward launches, and the state that it leaves."""
    state = partial = torch.empty((how.programs, how.layout.numbers), dtype=torch.float32, device=q.device)
    if how.add is not None:
        partial = state.new_empty(how.chunks, *state.shape)
    how.phases[0](q, k, v, out, mask, constant, shift, partial)
    if how.add is not None:
        how.add(partial, state)
    return state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, state: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, formula: Formula,
) -> Tensor | None:  # fmt: skip
    """Writes dq, dk and dv, whose last dimension is dense; returns the constant's gradient if there is a constant."""
    key: tuple[Any, ...] = (sort_of(q, k, v), formula, grad.stride(), dq.stride(), state is None)
    if mask is not None or constant is not None:
        key += (None if mask is None else mask.stride(), None if constant is None else constant.dtype)
    how = remembered.get(key)
    if how is None:
        strides = grad.stride() + by_part(dq, v)[1] + by_part(dk, v)[1] + dv.stride()[:3]
        how = remembered[key] = prepare("backward", q, k, v, strides, mask, formula)
    shift = shift_of(k, mask, formula)
    if state is None and (how.split or constant is not None):
        again = remembered.get((*key, "state"))
        if again is None:
            again = remembered[(*key, "state")] = prepare("state", q, k, v, grad.stride(), mask, formula)
        state = run_keys(again, q, k, v, grad, mask, constant, shift)
    dq_parts, dk_parts = dq, dk
    if how.layout.value_blocks > 1:
        dq_parts, dk_parts = (torch.empty(by_part(d, v)[0], dtype=torch.float32, device=d.device) for d in (dq, dk))
    d_state = partial = None
    if state is not None and (how.split or constant is not None):
        d_state = partial = torch.empty_like(state)
        if how.add is not None:
            partial = state.new_empty(how.chunks, *state.shape)
    for number, launch in enumerate(how.phases):
        where = partial if number == 0 else d_state
        launch(q, k, v, grad, dq_parts, dk_parts, dv, mask, constant, shift, state, where)
        if number == 0 and how.add is not None:
            how.add(partial, d_state)
    if how.layout.value_blocks > 1:
        dq.copy_(dq_parts.sum(0))
        dk.copy_(dk_parts.sum(0))
    if constant is None or state is None or d_state is None:
        return None
    values = how.layout.group * how.layout.value_width
    sums, d_sums = state[:, -2 * values :], d_state[:, -2 * values :]
    by_value = (sums[:, :values] * d_sums[:, :values]).sum()
    by_count = (sums[:, values] * d_sums[:, values:].sum(1)).sum() / how.layout.value_width
    return (by_value + by_count if formula.row_sum else by_value).to(constant.dtype)


def by_part(gradient: Tensor, v: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a gradient's parts, one per block of values; a single part is the gradient itself."""
    batch, heads, tokens, dim = gradient.shape
    blocks = layout_of(heads, dim, v.shape[3], v.dtype.itemsize).value_blocks
    if blocks == 1:
        return (1, *gradient.shape), (0, *gradient.stride()[:3])
    token, head = dim, tokens * dim
    return (blocks, *gradient.shape), (batch * heads * head, heads * head, head, token)


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `(batch, heads, tokens, head_dim)` as views of a packed `(batch, tokens, 3, heads, head_dim)`."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def empty_rows(batch: int, heads: int, tokens: int, dim: int, like: Tensor) -> Tensor:
    """An empty (batch, heads, tokens, dim) tensor with heads inside tokens, the layout that projections have."""
    strides = (tokens * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided((batch, heads, tokens, dim), strides, dtype=like.dtype, device=like.device)


def rows_like(tensor: Tensor, tokens: int | None = None) -> Tensor:
    """The same, of the shape of `tensor` or with another number of tokens."""
    batch, heads, own, dim = tensor.shape
    return empty_rows(batch, heads, own if tokens is None else tokens, dim, tensor)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, state: Tensor | None,
    formula: Formula,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
    return dq, dk, dv, backward(grad, q, k, v, mask, constant, state, dq, dk, dv, formula)


def packed_gradient(
    grad: Tensor, qkv: Tensor, mask: Tensor | None, constant: Tensor | None, state: Tensor | None, formula: Formula
) -> tuple[Tensor, Tensor | None]:
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    d_constant = backward(grad, *unpack(qkv), mask, constant, state, *unpack(d_qkv), formula)
    return d_qkv, d_constant
