"""Counting parameters, and multiply-accumulates (MACs) by a dry run on the meta device: no weights are copied, nothing
is computed.

Contractions (matrix products, convolutions, einsum) come from `torch.utils.flop_counter`, which counts two per MAC.
Inside a mechanism its own formula takes the place of what the counter saw, so a fused kernel and its reference cost
the same. Two conventions:

    macs    contractions only
    fvcore  as the tool of that name: contractions, and 5 for every element that LayerNorm, BatchNorm or GroupNorm
            normalises, 4 without an affine map. The Fair Comparison's table counts so, with BatchNorm in training mode.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from linvit.attention import Mechanism, Size
from linvit.errors import LinvitError, unknown

CONVENTIONS = ("macs", "fvcore")
aten = torch.ops.aten


@dataclass(frozen=True)
class Macs:
    """The count in its parts. `attention` is inside mechanisms, `other` everything else that contracts."""

    attention: int
    other: int
    normalised: int  # what the fvcore convention adds for norms

    def total(self, convention: str = "macs") -> int:
        if convention not in CONVENTIONS:
            raise unknown("convention", convention, CONVENTIONS)
        return self.attention + self.other + (self.normalised if convention == "fvcore" else 0)


def count_parameters(model: nn.Module, *, without: type[nn.Module] | None = None) -> int:
    """Trainable parameters, shared ones once; frozen ones do not count.

    `without` leaves out the parameters of all modules of a kind: some papers count so.
    """
    kinds = [] if without is None else [module for module in model.modules() if isinstance(module, without)]
    left_out = {id(p) for module in kinds for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in left_out)


def count_macs(model: nn.Module, size: Sequence[int] = (3, 224, 224), convention: str = "macs") -> int:
    """MACs of one picture of `size`, `(channels, height, width)`, through `model` at inference."""
    return measure_macs(model, size).total(convention)


def measure_macs(model: nn.Module, size: Sequence[int] = (3, 224, 224)) -> Macs:
    """The parts that `count_macs` adds up. The model may live on any device; it is left as it was."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    picture = torch.empty(1, *size, device="meta", dtype=dtype)
    ledger, modes = Ledger(), {module: module.training for module in model.modules()}
    try:
        # the plain form of SDPA is matrix products; what its fused forms count depends on the version of torch
        with torch.no_grad(), torch.device("meta"), sdpa_kernel(SDPBackend.MATH), ledger.counting():
            torch.func.functional_call(model.eval(), meta, (picture,))
    except (RuntimeError, NotImplementedError) as error:
        reason = f"cannot run without data, so it cannot be counted: {str(error).partition(chr(10))[0]}"
        raise LinvitError(f"{type(model).__name__} {reason}") from error
    finally:
        for module, training in modes.items():
            module.training = training
    return Macs(ledger.attention, ledger.products - ledger.replaced, ledger.normalised)


class Ledger(TorchDispatchMode):
    """Counts while a model runs, lets mechanisms speak for themselves, adds up normalised elements, and refuses a
    custom operator that nobody can count."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.replaced = self.normalised = 0
        self.depth = 0  # mechanisms within mechanisms: the outermost one's formula holds
        self.counter = FlopCounterMode(display=False, custom_mapping=VECTOR_PRODUCTS)

    @property
    def products(self) -> int:
        return self.counter.get_total_flops() // 2

    @contextmanager
    def counting(self) -> Iterator[None]:
        enter = register_module_forward_pre_hook(self.enter)
        with enter, register_module_forward_hook(self.leave, with_kwargs=True), self.counter, self:
            yield

    def enter(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, Mechanism):
            if not self.depth:
                self.replaced -= self.products
            self.depth += 1

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(module, Mechanism):
            self.depth -= 1
            if not self.depth:
                self.replaced += self.products
                self.attention += module.macs(Size.of(*args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "_overloadpacket", func)
        if packet in NORMS:
            weight = args[NORMS[packet]]
            self.normalised += args[0].numel() * (4 if weight is None else 5)
            if args[0].is_meta:  # the shape is all that a dry run needs; torch would take the norm apart for it
                dense = torch.contiguous_format if packet is aten.native_layer_norm else torch.preserve_format
                return torch.empty_like(args[0], memory_format=dense), *(args[0].new_empty(0) for _ in range(2))
        elif not self.depth and func.namespace not in BUILT_IN and packet not in flop_registry:
            raise LinvitError(
                f"cannot count {packet}: give it a formula with torch.utils.flop_counter.register_flop_formula"
            )
        return func(*args, **(kwargs or {}))


BUILT_IN = ("aten", "prim", "prims")
NORMS = {  # the operator, and where its weight stands
    aten.native_layer_norm: 2,
    aten.native_group_norm: 1,
    aten.native_batch_norm: 1,
    aten.cudnn_batch_norm: 1,
    aten._native_batch_norm_legit: 1,
    aten._native_batch_norm_legit_no_training: 1,
}


def vector_flops(*shapes: Sequence[int], **kwargs: Any) -> int:
    """Of a product with a vector: the matrix is the largest of what is given."""
    return 2 * max(prod(shape) for shape in shapes)


# which torch's own counter passes over
VECTOR_PRODUCTS: dict[Any, Any] = dict.fromkeys((aten.mv, aten.dot, aten.vdot, aten.addmv), vector_flops)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, every module back in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
