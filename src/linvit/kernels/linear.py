"""Linear attention as one op, forward and backward: `linear_attention(q, k, v, formula)`.

Registered with `torch.library` as linvit::linear_attention (and …_packed, for a packed projection), with fake kernels,
autograd and FLOP formulas. In plain eager mode the dispatcher is left out, which at small sizes costs as much as the
attention itself.

Where one program serves a head, forward reads q, k and v and writes the output, and backward reads q, k, v and the
output's gradient and writes dq, dk and dv: eleven tensors in all. Between them lies a state of head_dim² numbers for
each head. With few tokens that is more than softmax saves, and backward reads k and v once more instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.kernels import linear_launch as launch
from linvit.kernels import linear_ops as ops
from linvit.kernels.dispatch import shared_memory, unserved
from linvit.kernels.linear_launch import sort_of as sort_of
from linvit.kernels.linear_launch import unpack
from linvit.kernels.linear_plan import Formula, layout_of

FEATURES = ("relu", "elu_plus_one", "sigmoid", "direction", "square", "softmax", "key_softmax", "identity")
WIDEST = {2: 512, 4: 256}  # channels of a head that are served, by itemsize
LONGEST_STRIDE = 2**22  # of tokens and channels: offsets within a block are 32-bit


def why_not(q: Tensor, k: Tensor, v: Tensor, formula: Formula) -> str | None:
    """Why the kernel cannot serve these tensors, or None where it can."""
    why = unserved(q, k, v)
    if why is not None:
        return why
    if formula.feature not in FEATURES:
        return f"there is no kernel for the feature map '{formula.feature}'"
    if q.shape[3] > WIDEST[q.dtype.itemsize] or v.shape[3] > WIDEST[2]:
        return f"features of {q.shape[3]} or values of {v.shape[3]} channels are too wide for {q.dtype}"
    if (
        q.is_cuda
        and q.dtype == torch.float32
        and max(q.shape[3], v.shape[3]) > 64
        and shared_memory(q.device) < 168_000
    ):
        return "float32 heads wider than 64 need more shared memory than this GPU has"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to in an empty tensor"
    if formula.own and q.shape[2] != k.shape[2]:
        return "the term with the query's own value needs as many keys as queries"
    if formula.norm and layout_of(q.shape[1], q.shape[3], v.shape[3], q.dtype.itemsize).value_blocks > 1:
        return f"values of {v.shape[3]} channels are too wide for the fused output norm"
    if max(q.stride()[2:] + k.stride()[2:] + v.stride()[2:]) > LONGEST_STRIDE:
        return "tokens or channels are further apart than 32-bit offsets reach"
    return None


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None,
    sort: tuple[Any, ...] | None = None,
) -> Tensor:  # fmt: skip
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part; `constant` is a scalar that the formula adds to
    every product of a query and a key; `sort` is their `sort_of`, from callers that know it and that they are `plain`.
    """
    save = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (constant is not None and constant.requires_grad)
    )
    if sort is None and not plain(q):
        return ops.attention(q, k, v, mask, constant, *formula, save)[0]
    if not save:
        return launch.forward(q, k, v, mask, constant, formula, False, sort)[0]
    return _Separate.apply(q, k, v, mask, constant, formula, sort)


def linear_attention_packed(
    qkv: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None
) -> Tensor:
    """The same from a packed `(batch, tokens, 3, heads, head_dim)` projection, whose gradient is written as a whole."""
    save = torch.is_grad_enabled() and (qkv.requires_grad or (constant is not None and constant.requires_grad))
    if not plain(qkv):
        return ops.packed(qkv, mask, constant, *formula, save)[0]
    if not save:
        return launch.forward(*unpack(qkv), mask, constant, formula, False)[0]
    return _Packed.apply(qkv, unpack(qkv), mask, constant, formula, None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None,
    sort: tuple[Any, ...] | None = None,
) -> Tensor:  # fmt: skip
    """`linear_attention`, but views of one packed projection get their gradients in one packed tensor."""
    if torch.is_grad_enabled():
        whole = packed_source(q, k, v)
        if whole is not None:
            return _Packed.apply(whole, (q, k, v), mask, constant, formula, sort)
    return linear_attention(q, k, v, formula, mask, constant, sort)


def plain(tensor: Tensor) -> bool:
    """Whether nobody watches: no tracing, no dispatch mode (FLOP counters, fake tensors), no function transform."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
    )


def packed_source(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The packed tensor that q, k and v are the views of, if they are and need gradients; its shape is its own.

    One gradient of it spares autograd to stack three. The views are then no part of the graph, so there is no answer
    where anybody looks at their gradients by hooks or `retain_grad`.
    """
    base = q._base
    if base is None or not base.requires_grad or k._base is not base or v._base is not base or not plain(q):
        return None
    batch, heads, tokens, dim = q.shape
    row = heads * dim
    strides = (3 * tokens * row, dim, 3 * row, 1)
    if q.stride() != strides or k.stride() != strides or v.stride() != strides:
        return None
    if q.shape != k.shape or q.shape != v.shape or base.numel() != 3 * batch * tokens * row or not base.is_contiguous():
        return None
    first = base.storage_offset()
    for view in (q, k, v):
        if view.storage_offset() != first or not view.requires_grad or view._backward_hooks or view.retains_grad:
            return None
        first += row
    return base


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, constant: Any, formula: Any, sort: Any) -> Tensor:
        out, state = launch.forward(q, k, v, mask, constant, formula, True, sort)
        ctx.save_for_backward(q, k, v, mask, constant, state)
        ctx.formula = formula
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _only_once()
        q, k, v, mask, constant, state = ctx.saved_tensors
        dq, dk, dv, d_constant = launch.gradients(grad, q, k, v, mask, constant, state, ctx.formula)
        return dq, dk, dv, None, d_constant, None, None


class _Packed(torch.autograd.Function):
    """`qkv` is packed in any shape; `views` are its q, k and v."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, views: Any, mask: Any, constant: Any, formula: Formula, sort: Any) -> Tensor:
        q, k, v = views
        out, state = launch.forward(q, k, v, mask, constant, formula, True, sort)
        ctx.save_for_backward(qkv, mask, constant, state)
        ctx.formula, ctx.shape = formula, q.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _only_once()
        qkv, mask, constant, state = ctx.saved_tensors
        batch, heads, tokens, dim = ctx.shape
        whole = qkv.view(batch, tokens, 3, heads, dim)
        d_qkv, d_constant = launch.packed_gradient(grad, whole, mask, constant, state, ctx.formula)
        return d_qkv.view(qkv.shape), None, None, d_constant, None, None


def _only_once() -> None:
    """The gradients have none of their own; autograd enables grad mode here when it was asked for a graph of them."""
    if torch.is_grad_enabled():
        raise LinvitError("the fused linear attention cannot be differentiated twice; use impl='reference'")
