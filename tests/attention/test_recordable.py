"""No mechanism asks the host while it computes, or sends it anything: a CUDA graph can hold both passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from linvit.attention import TokenGrid
from tests.attention.cases import Case, call, cases, inputs

aten = torch.ops.aten
ASKS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.bincount}


class Host(TorchDispatchMode):
    """Notes operations whose result the host waits for, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        which = func.overloadpacket
        if which in ASKS:
            self.asked.append(str(func))
        if which is aten.index and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            self.asked.append("a place chosen by a mask")
        if which in (aten._to_copy, aten.copy_):
            sent, got = (t.device for t in ((args[1], args[0]) if which is aten.copy_ else (args[0], out)))
            if sent != got:
                self.asked.append(f"a copy from {sent} to {got}")
        return out


def grid_of(case: Case) -> TokenGrid:
    grid = TokenGrid(4, 6, 1)
    return grid if case.build(grid).capabilities.prefix else replace(grid, prefix=0)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_nothing_is_asked_of_the_host(case: Case) -> None:
    grid = grid_of(case)
    mechanism = case.build(grid).train()
    tensors = tuple(tensor.requires_grad_() for tensor in inputs(grid))
    with Host() as host:
        call(mechanism, tensors, grid).square().sum().backward()
    assert not host.asked


@pytest.mark.parametrize("case", cases(), ids=str)
def test_nothing_is_sent_to_the_device(case: Case) -> None:
    grid = grid_of(case)
    mechanism = case.build(grid, impl="reference").train()
    with FakeTensorMode(), torch.no_grad():
        move(mechanism)
        tensors = tuple(torch.empty(tensor.shape, device="cuda") for tensor in inputs(grid))
        with Host() as host:
            assert call(mechanism, tensors, grid).device.type == "cuda"
    assert not host.asked


def move(module: nn.Module) -> None:
    """Everything the module has to a device that only the shapes of tensors know."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = None if parameter is None else nn.Parameter(moved(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else moved(buffer)


def moved(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def test_the_watch_sees_what_it_is_for() -> None:
    x = torch.arange(4.0)
    for ask in (lambda: float(x.sum()), lambda: x[x > 1], lambda: x.nonzero()):
        with Host() as host:
            ask()
        assert host.asked
    with FakeTensorMode():
        far = torch.empty(4, device="cuda")
        for send in (lambda: torch.zeros(4).to(far), lambda: far.copy_(torch.zeros(4))):
            with Host() as host:
                send()
            assert host.asked == ["a copy from cpu to cuda:0"]
