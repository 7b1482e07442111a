"""Fused ops as operators of PyTorch, `linvit::name` and `linvit::name_packed`, for compilers, exporters and counters.

Arguments are q, k and v in any strides, or one packed `(batch, tokens, 3, heads, head_dim)` projection; then the
tensors beside them, the mask first, and the op's options. Beside the output come the tensors that are saved for the
backward, empty where that computes them again.
"""

from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linvit.errors import LinvitError
from linvit.kernels.fused import (
    TRANSFORMED,
    FusedOp,
    no_kernels_on,
    refuse_graph,
    rows_like,
    signature_of,
    transformed,
    unpack,
)

KINDS = {bool: "bool", int: "SymInt", float: "float", str: "str"}  # of options, in a schema
library = torch.library.Library("linvit", "FRAGMENT")


def register(op: FusedOp) -> FusedOp:
    """Make an op's operators, with their fake kernels, autograd and FLOP formulas."""
    op.separate_op, op.packed_op = define(op, packed=False), define(op, packed=True)
    return op


def define(op: FusedOp, packed: bool) -> Any:
    """Define the operator and its backward, from q, k and v or from a packed projection."""
    name = f"{op.name}_packed" if packed else op.name
    count, tensors = (1, "Tensor qkv") if packed else (3, "Tensor q, Tensor k, Tensor v")
    states, beside = len(op.saved), len(op.constants) + len(op.learned)
    kept = states + op.keep_output
    given = ", ".join(f"Tensor? {tensor}" for tensor in (*op.constants, *op.learned))
    options = "".join(f", {KINDS[kind]} {field}" for field, kind in get_type_hints(op.options).items())
    saved = "".join(f"Tensor {tensor}, " for tensor in (*("out",) * op.keep_output, *op.saved))
    save, wanted = ", bool save" * op.lazy, "".join(f", bool d_{tensor}" for tensor in op.learned)
    library.define(f"{name}({tensors}, {given}{options}{save}) -> {returns(1 + states)}")
    gradients = returns(count + len(op.learned))
    library.define(f"{name}_backward(Tensor grad, {tensors}, {saved}{given}{options}{wanted}) -> {gradients}")

    def views(args: Any) -> Any:
        return unpack(args[0]) if packed else args[:3]

    def empty(args: Any) -> tuple[Any, Any]:
        """The gradients of the tensors, and the same as dq, dk and dv."""
        if packed:
            d_qkv = torch.empty_like(args[0], memory_format=torch.contiguous_format)
            return (d_qkv,), unpack(d_qkv)
        rows = tuple(map(rows_like, args[:3]))
        return rows, rows

    def forward(*args: Any) -> Any:
        q, k, v = views(args)
        why = (TRANSFORMED if transformed() else None) if op.cpu else no_kernels_on(q.device)
        if why is not None:
            raise LinvitError(f"linvit::{name} cannot run here: {why}")
        given, options, save = parse(op, args[count:])
        op.check(q, given)
        found = op.forward(q, k, v, given, options, save == (True,), signature_of(q, k, v))
        return one_or_all(q.new_empty(0, dtype=torch.float32) if t is None else t for t in found)

    def fake_forward(*args: Any) -> Any:
        q, _, v = views(args)
        _, options, save = parse(op, args[count:])
        sizes = ((0,),) * states if save == (False,) else op.saved_sizes(q, v, options)
        saved = (q.new_empty(size, dtype=torch.float32) for size in sizes)
        return one_or_all((rows_like(v, q.shape[2]), *saved))

    def backward(grad: Tensor, *args: Any) -> Any:
        saved = [state if state.numel() else None for state in args[count : count + kept]]
        given, options, wanted = parse(op, args[count + kept :])
        found, parts = empty(args)
        d_learned = op.backward(grad, *views(args), *parts, given, saved, options, wanted)
        return one_or_all((*found, *(grad.new_empty(0) if d is None else d for d in d_learned)))

    def fake_backward(grad: Tensor, *args: Any) -> Any:
        given, _, wanted = parse(op, args[count + kept :])
        learned = zip(given[len(op.constants) :], wanted, strict=True)
        d_learned = (one.new_empty(one.shape) if asked else grad.new_empty(0) for one, asked in learned)
        return one_or_all((*empty(args)[0], *d_learned))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if op.lazy and not inputs[-1]:
            raise LinvitError(f"call {name} with save=True where a gradient is needed")
        outputs = output if states else (output,)
        last = count + beside
        ctx.save_for_backward(*inputs[:count], *outputs[0 if op.keep_output else 1 :], *inputs[count:last])
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.options = inputs[last : len(inputs) - op.lazy]

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        refuse_graph(op.name)
        wanted = ctx.needs_input_grad[count + len(op.constants) : count + beside]
        found = backward_op.default(grad, *ctx.saved_tensors, *ctx.options, *wanted)
        found = found if isinstance(found, tuple) else (found,)
        d_learned = (d if asked else None for d, asked in zip(found[count:], wanted, strict=True))
        constants = (None for _ in op.constants)
        return *found[:count], *constants, *d_learned, *(None for _ in ctx.options), *((None,) * op.lazy)

    def shapes(args: Any) -> tuple[Any, Any]:
        if not packed:
            return args[0], args[2]
        batch, tokens, _, heads, dim = args[0]
        return ((batch, heads, tokens, dim),) * 2

    for which, run, fake in ((name, forward, fake_forward), (f"{name}_backward", backward, fake_backward)):
        library.impl(which, run, "CUDA")
        library.impl(which, run, "CPU")  # for Triton's interpreter, and for ops with `cpu`
        torch.library.register_fake(f"linvit::{which}", fake, lib=library)
    torch.library.register_autograd(f"linvit::{name}", differentiate, setup_context=setup, lib=library)
    forward_op, backward_op = (getattr(torch.ops.linvit, which) for which in (name, f"{name}_backward"))

    def counted(formula: Any, args: Any, rest: Any) -> Any:
        given, options, _ = parse(op, rest)
        return formula(*shapes(args), options, given)

    register_flop_formula(forward_op)(lambda *args, **_: counted(op.flops, args, args[count:]))
    register_flop_formula(backward_op)(lambda _, *args, **__: counted(op.backward_flops, args, args[count + kept :]))
    return forward_op.default


def parse(op: FusedOp, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """The tensors beside q, k and v and the options of an operator's arguments, and the flags that may follow."""
    first = len(op.constants) + len(op.learned)
    last = first + len(op.options._fields)
    return rest[:first], op.options(*rest[first:last]), rest[last:]


def returns(count: int) -> str:
    """An operator's outputs in its schema."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def one_or_all(found: Any) -> Any:
    """Outputs as an operator returns them."""
    found = tuple(found)
    return found if len(found) > 1 else found[0]
