"""Linear attention as one op, forward and backward: `linear_attention(q, k, v, formula)`, linvit::linear_attention.

Where one program serves a head, forward reads q, k and v and writes the output, and backward reads q, k, v and the
output's gradient and writes dq, dk and dv: eleven tensors in all. Between them lies a state of head_dim² numbers for
each head. With few tokens that is more than softmax saves, and backward reads k and v once more instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linvit.kernels.fused import FusedOp, shared_memory, unserved
from linvit.kernels.linear.launch import Formula, backward, forward, layout_of, state_sizes
from linvit.kernels.operators import register

FEATURES = ("relu", "elu_plus_one", "sigmoid", "direction", "square", "softmax", "key_softmax", "identity")
WIDEST = {2: 512, 4: 256}  # channels of a head that are served, by itemsize
LONGEST_STRIDE = 2**22  # of tokens and channels: offsets within a block are 32-bit


def why_not(q: Tensor, k: Tensor, v: Tensor, formula: Formula) -> str | None:
    """Why the kernel cannot serve these tensors, or None where it can."""
    why = unserved(q, k, v)
    if why is not None:
        return why
    head_dim, value_dim, size = q.shape[3], v.shape[3], q.dtype.itemsize
    if formula.feature not in FEATURES:
        return f"there is no kernel for the feature map '{formula.feature}'"
    if head_dim > WIDEST[size] or value_dim > WIDEST[2]:
        return f"features of {head_dim} or values of {value_dim} channels are too wide for {q.dtype}"
    if q.is_cuda and q.dtype == torch.float32 and max(head_dim, value_dim) > 64 and shared_memory(q.device) < 168_000:
        return "float32 heads wider than 64 need more shared memory than this GPU has"
    if formula.own and q.shape[2] != k.shape[2]:
        return "the term with the query's own value needs as many keys as queries"
    if formula.norm and layout_of(q.shape[1], head_dim, value_dim, size).value_blocks > 1:
        return f"values of {value_dim} channels are too wide for the fused output norm"
    if max(q.stride()[2:] + k.stride()[2:] + v.stride()[2:]) > LONGEST_STRIDE:
        return "tokens or channels are further apart than 32-bit offsets reach"
    return None


def flops(q: torch.Size, v: torch.Size, formula: Formula) -> int:
    """Two per multiply-accumulate of the two products, and of the row sum, as in the plain reference."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * head_dim * ((queries + v[2]) * v[3] + (queries if formula.row_sum else 0))


op = register(
    FusedOp(
        "linear_attention", Formula, forward, backward,
        flops=flops, learned="constant", saved=("state",), saved_sizes=state_sizes, lazy=True,
    )
)  # fmt: skip


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None,
    signature: tuple[Any, ...] | None = None,
) -> Tensor:  # fmt: skip
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part; `constant` is a scalar that the formula adds to
    every product of a query and a key; `signature` as in `FusedOp`.
    """
    return op(q, k, v, mask, constant, formula, signature)


def linear_attention_packed(
    qkv: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None
) -> Tensor:
    """The same from a packed `(batch, tokens, 3, heads, head_dim)` projection."""
    return op.packed(qkv, mask, constant, formula)
