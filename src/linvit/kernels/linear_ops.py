"""Linear attention as PyTorch operators, for compilers, exporters and counters.

    linvit::linear_attention, …_backward                 q, k and v in any strides
    linvit::linear_attention_packed, …_packed_backward   one packed (batch, tokens, 3, heads, head_dim) projection

The formula's fields come last but one. Beside the output comes a state for the backward, empty unless `save` is set and
backward would not rather compute it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linvit.errors import LinvitError
from linvit.kernels import linear_launch as launch
from linvit.kernels.dispatch import no_kernels_on
from linvit.kernels.linear_plan import Formula, layout_of

FORMULA = (
    "Tensor? mask, Tensor? constant, str feature, bool row_sum, bool clamp, float scale, float eps, "
    "float feature_eps, float own, bool norm, float norm_eps"
)
library = torch.library.Library("linvit", "FRAGMENT")
library.define(f"linear_attention(Tensor q, Tensor k, Tensor v, {FORMULA}, bool save) -> (Tensor, Tensor)")
library.define(
    f"linear_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor state, {FORMULA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(f"linear_attention_packed(Tensor qkv, {FORMULA}, bool save) -> (Tensor, Tensor)")
library.define(
    f"linear_attention_packed_backward(Tensor grad, Tensor qkv, Tensor state, {FORMULA}) -> (Tensor, Tensor)"
)
attention = torch.ops.linvit.linear_attention.default
attention_backward = torch.ops.linvit.linear_attention_backward.default
packed = torch.ops.linvit.linear_attention_packed.default
packed_backward = torch.ops.linvit.linear_attention_packed_backward.default


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, *rest: Any) -> Any:
    _insist(q)
    out, state = launch.forward(q, k, v, mask, constant, Formula(*rest[:-1]), rest[-1])
    return out, q.new_empty(0, dtype=torch.float32) if state is None else state


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, mask: Any, constant: Any, *rest: Any
) -> Any:
    dq, dk, dv, d_constant = launch.gradients(grad, q, k, v, mask, constant, _given(state), Formula(*rest))
    return dq, dk, dv, q.new_empty(0) if d_constant is None else d_constant


def _packed(qkv: Tensor, mask: Tensor | None, constant: Tensor | None, *rest: Any) -> Any:
    return _attention(*launch.unpack(qkv), mask, constant, *rest)


def _packed_backward(
    grad: Tensor, qkv: Tensor, state: Tensor, mask: Tensor | None, constant: Tensor | None, *rest: Any
) -> Any:
    d_qkv, d_constant = launch.packed_gradient(grad, qkv, mask, constant, _given(state), Formula(*rest))
    return d_qkv, qkv.new_empty(0) if d_constant is None else d_constant


def _insist(tensor: Tensor) -> None:
    why = no_kernels_on(tensor.device)
    if why is not None:
        raise LinvitError(f"linvit::linear_attention cannot run here: {why}")


def _given(state: Tensor) -> Tensor | None:
    return state if state.numel() else None


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, *rest: Any) -> Any:
    batch, heads, queries, _ = q.shape
    out = launch.empty_rows(batch, heads, queries, v.shape[3], q)
    layout = layout_of(int(heads), int(q.shape[3]), int(v.shape[3]), q.dtype.itemsize)
    kept = rest[-1] and launch.keeps_state(q, v)
    size = (layout.programs(batch, heads), layout.numbers) if kept else (0,)
    return out, q.new_empty(size, dtype=torch.float32)


def _fake_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, mask: Any, constant: Any, *rest: Any
) -> Any:
    empty = q.new_empty(0) if constant is None else torch.empty_like(constant)
    return *(launch.rows_like(t) for t in (q, k, v)), empty


def _fake_packed(qkv: Tensor, mask: Tensor | None, constant: Tensor | None, *rest: Any) -> Any:
    return _fake_attention(*launch.unpack(qkv), mask, constant, *rest)


def _fake_packed_backward(grad: Tensor, qkv: Tensor, state: Tensor, mask: Any, constant: Any, *rest: Any) -> Any:
    empty = qkv.new_empty(0) if constant is None else torch.empty_like(constant)
    return torch.empty_like(qkv, memory_format=torch.contiguous_format), empty


def _save(tensors: int) -> Any:
    """What autograd keeps: the op's first `tensors` inputs, mask and constant, its state, and the formula."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if not inputs[-1]:
            raise LinvitError("call linear_attention with save=True where a gradient is needed")
        ctx.save_for_backward(*inputs[: tensors + 2], output[1])
        ctx.formula = inputs[tensors + 2 : -1]
        ctx.set_materialize_grads(False)

    return keep


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    rest = (None,) * (len(ctx.formula) + 1)
    *inputs, mask, constant, state = ctx.saved_tensors
    if grad is None:
        return (*(None for _ in inputs), None, None, *rest)
    op = packed_backward if len(inputs) == 1 else attention_backward
    *found, d_constant = op(grad, *inputs, state, mask, constant, *ctx.formula)
    return *found, None, d_constant if constant is not None else None, *rest


for name, kernel, fake in (
    ("linear_attention", _attention, _fake_attention),
    ("linear_attention_backward", _attention_backward, _fake_attention_backward),
    ("linear_attention_packed", _packed, _fake_packed),
    ("linear_attention_packed_backward", _packed_backward, _fake_packed_backward),
):
    library.impl(name, kernel, "CUDA")
    library.impl(name, kernel, "CPU")  # for Triton's interpreter
    torch.library.register_fake(f"linvit::{name}", fake, lib=library)
torch.library.register_autograd("linvit::linear_attention", _differentiate, setup_context=_save(3), lib=library)
torch.library.register_autograd("linvit::linear_attention_packed", _differentiate, setup_context=_save(1), lib=library)


def _flops(q: torch.Size, v: torch.Size, row_sum: bool) -> int:
    """Two per multiply-accumulate of the two products, and of the row sum, as in the plain reference."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * head_dim * ((queries + v[2]) * v[3] + (queries if row_sum else 0))


def _packed_flops(qkv: torch.Size, row_sum: bool) -> int:
    batch, tokens, _, heads, dim = qkv
    return _flops(torch.Size((batch, heads, tokens, dim)), torch.Size((batch, heads, tokens, dim)), row_sum)


# Each takes the op's arguments, tensors as their shapes; the row sum is the fourth after the tensors.
register_flop_formula(torch.ops.linvit.linear_attention)(lambda q, k, v, *rest, **_: _flops(q, v, rest[3]))
register_flop_formula(torch.ops.linvit.linear_attention_backward)(
    lambda grad, q, k, v, state, *rest, **_: 2 * _flops(q, v, rest[3])
)
register_flop_formula(torch.ops.linvit.linear_attention_packed)(lambda qkv, *rest, **_: _packed_flops(qkv, rest[3]))
register_flop_formula(torch.ops.linvit.linear_attention_packed_backward)(
    lambda grad, qkv, state, *rest, **_: 2 * _packed_flops(qkv, rest[3])
)
