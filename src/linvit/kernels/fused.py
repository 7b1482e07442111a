"""What every fused op shares: which tensors it serves, how its kernels are launched, and its gradients.

An op is a folder beside this file: a `why_not`, the launches of its Triton kernels forward and backward, and one
`FusedOp` that joins them. Plain eager calls leave the dispatcher out, which at small sizes costs as much as the
attention itself; everybody else calls the operator that `operators.py` makes of it. Nothing here needs Triton or a GPU
to be imported.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linvit.errors import LinvitError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LONGEST_STRIDE = 2**22  # of tokens and channels: offsets within a block are 32-bit
APART = "tokens or channels are further apart than 32-bit offsets reach"
Strides = tuple[int, ...]
Given = tuple[Tensor | None, ...]  # what an op takes beside q, k and v
LEAST = 1e-30  # of a length that is divided by: tokens that only fill a tile have none, whatever eps is
launch_cache = lru_cache(maxsize=4096)  # decorates what prepares launches; a service may see any number of shapes


@torch.compiler.assume_constant_result
def no_kernels_on(device: torch.device) -> str | None:
    """Why no Triton kernel can run on this device now, or None where they can."""
    return TRANSFORMED if transformed() else _no_kernels_on(device)


TRANSFORMED = "torch.func and forward-mode differentiation see into the plain formula only"


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU: for tests, by TRITON_INTERPRET=1."""
    from linvit.kernels.tiles import INTERPRETED

    return bool(INTERPRETED.value)


@lru_cache(maxsize=64)
def _no_kernels_on(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and interpreted():
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the tensors are on {'an AMD GPU' if device.type == 'cuda' else device.type}, not on an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


def unserved(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why no kernel can serve tensors on this device, of these types, empty ones or so wide apart; otherwise None."""
    why = no_kernels_on(q.device)
    if why is not None:
        return why
    for tensor in (k, v):
        if tensor.dtype != q.dtype:
            return f"the tensors have different types, {q.dtype} and {tensor.dtype}"
        if tensor.device != q.device:
            return f"the tensors are on different devices, {q.device} and {tensor.device}"
    if q.dtype not in DTYPES:
        return f"the tensors are {q.dtype}, not float32, float16 or bfloat16"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to in an empty tensor"
    # The compiler of torch 2.15 fails at strides that it knows by a symbol; there `in_units` refuses them.
    if not torch.compiler.is_compiling() and longest(q.stride(), k.stride(), v.stride()) > LONGEST_STRIDE:
        return APART
    return None


def longest(*strides: Strides) -> int:
    """How far apart tokens or channels are at most."""
    return max([max(of[2:]) for of in strides])


def plain(tensor: Tensor) -> bool:
    """Whether nobody watches: no tracing, no dispatch mode (FLOP counters, fake tensors), no transform."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or transformed()
    )


def exporting() -> bool:
    """Whether a program is being made for another runtime, which knows no op of ours: it is given the plain formula."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def refuse_graph(name: str) -> None:
    """In a backward pass; autograd enables itself there when it was asked for a graph of the gradients."""
    if torch.is_grad_enabled():
        raise LinvitError(f"the fused {name} cannot be differentiated twice; use impl='reference'")


MEMORY = 232_448  # bytes of shared memory that a program can have on an H200


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    return _shared_memory(device)


@lru_cache(maxsize=64)
def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else MEMORY


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def in_units(itemsize: int, *strides: Strides) -> tuple[int, tuple[int, ...]]:
    """A unit, 16 bytes where that divides all of them, and strides of batch, heads and tokens in it; channels' are not.

    Triton knows of an argument only whether 16 divides it. It does not divide the 72 channels of a head, and all reads
    of those would be two bytes wide; multiplied inside the kernel by a constant unit, strides show that 8 does.
    """
    if longest(*strides) > LONGEST_STRIDE:
        raise LinvitError(APART)
    unit = 16 // itemsize
    if any(stride % unit for of in strides for stride in of[:3]):
        unit = 1
    return unit, tuple(stride // unit if i < 3 else stride for of in strides for i, stride in enumerate(of))


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


def signature_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Everything about q, k and v that a launch depends on: shapes, strides, types and devices."""
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    return (*shapes, *strides, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `(batch, heads, tokens, head_dim)` as views of a packed `(batch, tokens, 3, heads, head_dim)`."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def rows_like(tensor: Tensor, tokens: int | None = None) -> Tensor:
    """An empty tensor like this one or with other tokens, heads inside tokens: the layout that projections have."""
    batch, heads, own, dim = tensor.shape
    tokens = own if tokens is None else tokens
    strides = (tokens * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided((batch, heads, tokens, dim), strides, dtype=tensor.dtype, device=tensor.device)


class Launch:
    """A kernel with all its arguments but the pointers.

    Triton looks at every argument of every call to pick the compiled kernel, which takes longer than a small kernel
    runs. All but the pointers is the same in calls of the same signature, so that is done once. Launch hooks,
    Triton's own for profilers, are not called.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], values: tuple[Any, ...], **options: int | None) -> None:
        self.kernel, self.grid, self.values = kernel, grid, values
        self.options = {"enable_fp_fusion": True, **options}  # what Triton 3.10 does when it is asked to only
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


class FusedOp:
    """A fused attention: its kernels forward and backward, and what eager calls, autograd and operators need of them.

    `given` are the tensors beside q, k and v, None for those that are not there: first the `constants`, of which
    `mask`, boolean (batch, keys), is true for the keys that take part, then the `learned`, which have gradients.
    `forward(q, k, v, given, options, save, signature)` returns the output, `rows_like` v at the queries, and what
    backward needs: float32 tensors named `saved`, whose sizes `saved_sizes(q, v, options)` tells, or None for one that
    backward computes again. `backward(grad, q, k, v, dq, dk, dv, given, saved, options, wanted)` writes dq, dk and dv,
    whose channels are dense, and returns the gradients of the learned, None where `wanted` says so. `options` is a
    NamedTuple of plain values. `lazy` ops save nothing unless they are asked to. To those that `keep_output`, `saved`
    begins with the output. `flops(q, v, options, given)` counts from shapes. Only ops with `cpu` run on the CPU without
    Triton's interpreter.
    """

    def __init__(
        self, name: str, options: Any, forward: Callable[..., tuple[Tensor | None, ...]],
        backward: Callable[..., tuple[Tensor | None, ...]], *, flops: Callable[[Any, Any, Any, Any], int],
        backward_flops: Callable[[Any, Any, Any, Any], int] | None = None, constants: tuple[str, ...] = ("mask",),
        learned: tuple[str, ...] = (), saved: tuple[str, ...] = (),
        saved_sizes: Callable[..., tuple[tuple[int, ...], ...]] = lambda q, v, options: (), lazy: bool = False,
        keep_output: bool = False, cpu: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.options, self.forward, self.backward = name, options, forward, backward
        self.flops, self.backward_flops = flops, backward_flops or (lambda *of: 2 * flops(*of))
        self.constants, self.learned, self.saved, self.saved_sizes = constants, learned, saved, saved_sizes
        self.lazy, self.keep_output, self.cpu = lazy, keep_output, cpu
        self.separate_op: Any = None  # set by operators.register
        self.packed_op: Any = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, given: Given, options: Any, signature: tuple[Any, ...] | None = None
    ) -> Tensor:
        """Attend; `signature` is that of q, k and v, from callers that know it and that they are `plain`."""
        self.check(q, given)
        save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or self.learns(given))
        if signature is None:
            if not plain(q):
                return self._dispatch(self.separate_op, (q, k, v), given, options, save)
            signature = signature_of(q, k, v)
        if not save:
            return self.forward(q, k, v, given, options, False, signature)[0]  # type: ignore[return-value]
        return _Fused.apply(self, options, signature, packed_source(q, k, v), q, k, v, *given)

    def packed(self, qkv: Tensor, given: Given, options: Any) -> Tensor:
        """The same from a packed `(batch, tokens, 3, heads, head_dim)` projection, for compilers and exporters too."""
        if plain(qkv):
            return self(*unpack(qkv), given, options)
        save = torch.is_grad_enabled() and (qkv.requires_grad or self.learns(given))
        return self._dispatch(self.packed_op, (qkv,), given, options, save)

    def check(self, q: Tensor, given: Given) -> None:
        """Pointers to another device's memory must not reach a kernel."""
        for tensor in given:
            if tensor is not None and tensor.device != q.device:
                raise LinvitError(f"{self.name} has q on {q.device} and a mask or parameter on {tensor.device}")

    def learns(self, given: Given) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in given[len(self.constants) :])

    def _dispatch(self, op: Any, tensors: Any, given: Given, options: Any, save: bool) -> Tensor:
        found = op(*tensors, *given, *options, *((save,) if self.lazy else ()))
        return found[0] if self.saved else found


def packed_strides(shape: torch.Size) -> tuple[int, Strides]:
    """How far apart q, k and v of this shape lie in a packed tensor, and the strides of each."""
    _, heads, tokens, dim = shape
    row = heads * dim
    return row, (3 * tokens * row, dim, 3 * row, 1)


def packed_source(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The packed tensor that q, k and v are the views of, if they are and need gradients; its shape is its own."""
    base = q._base
    if base is None or not base.requires_grad or k._base is not base or v._base is not base:
        return None
    row, strides = packed_strides(q.shape)
    if q.stride() != strides or k.stride() != strides or v.stride() != strides:
        return None
    if q.shape != k.shape or q.shape != v.shape or base.numel() != 3 * q.numel() or not base.is_contiguous():
        return None
    first = base.storage_offset()
    for view in (q, k, v):
        if view.storage_offset() != first or view.is_leaf:  # without a gradient, or with one of its own
            return None
        first += row
    return base


class _Fused(torch.autograd.Function):
    """`whole` is the packed source of q, k and v, in any shape, or None.

    A plain `backward()` gives it one packed gradient and the views none, which spares autograd to stack three. Where
    somebody looks at the views' gradients (`torch.autograd.grad`, `backward(inputs=…)`, hooks, `retain_grad`) they get
    theirs, and the whole gets its own through them. Hooks on views that lie between these and the whole are not seen.
    """

    @staticmethod
    def forward(
        ctx: Any, op: FusedOp, options: Any, signature: Any, whole: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        *given: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out, *saved = op.forward(q, k, v, given, options, True, signature)
        kept = (out, *saved) if op.keep_output else saved
        ctx.save_for_backward(q, k, v, *given, *kept)
        ctx.op, ctx.options, ctx.whole, ctx.given = op, options, None if whole is None else whole.shape, len(given)
        return out  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph(ctx.op.name)
        q, k, v, *others = ctx.saved_tensors
        given, saved, constants = tuple(others[: ctx.given]), others[ctx.given :], len(ctx.op.constants)
        rest = (given, saved, ctx.options, ctx.needs_input_grad[7 + constants :])
        # A checkpoint is valid in a plain backward() only: that is how PyTorch tells it from `grad` and `inputs=`.
        hooks = q._backward_hooks or k._backward_hooks or v._backward_hooks
        watched = hooks or q.retains_grad or k.retains_grad or v.retains_grad
        plainly = torch.autograd._is_checkpoint_valid() and not watched
        nothing = (None,) * constants
        if ctx.whole is not None and plainly:
            d_whole = torch.empty(ctx.whole, dtype=q.dtype, device=q.device)
            row, strides = packed_strides(q.shape)
            parts = (d_whole.as_strided(q.shape, strides, first) for first in (0, row, 2 * row))
            d_learned = ctx.op.backward(grad, q, k, v, *parts, *rest)
            return None, None, None, d_whole, None, None, None, *nothing, *d_learned
        dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
        d_learned = ctx.op.backward(grad, q, k, v, dq, dk, dv, *rest)
        return None, None, None, None, dq, dk, dv, *nothing, *d_learned
