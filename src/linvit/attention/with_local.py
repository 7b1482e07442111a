"""Any mechanism with a local branch: `create_attention(name, local=3)`.

    out = mechanism(q, k, v) + conv(v)

The convolution is depthwise over the patch grid, as wide as asked for, and zero at first: a converted model begins as
it would without. What linear attention lacks most is a sharp look at the neighbourhood, and this costs next to nothing.
Mechanisms whose paper has a branch of its own keep it beside this one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from linvit.attention.grid import TokenGrid
from linvit.attention.local import GridConv, values_at_queries
from linvit.attention.mechanism import Call, Mechanism, Size
from linvit.errors import LinvitError


class WithLocal(Mechanism):
    """The mechanism inside does all it did; only the output has the branch added."""

    def __init__(self, inner: Mechanism, kernel_size: int) -> None:
        self.name, self.paper = inner.name, inner.paper  # type: ignore[misc]
        if type(kernel_size) is not int or kernel_size < 1 or kernel_size % 2 == 0:
            raise LinvitError(f"local is the width of a convolution: an odd number, got {kernel_size!r}")
        super().__init__(inner.shape)
        self.require("heads", "head_dim")
        self.built_for |= inner.built_for
        self.variant, self.inner = inner.variant, inner
        self.capabilities = replace(inner.capabilities, grid=True, equivariant=False)
        self.conv = GridConv((inner.shape.heads or 1) * inner.shape.values, kernel_size, bias=False)
        nn.init.zeros_(self.conv.conv.weight)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "impl" and "inner" in self._modules:
            self.inner.impl = value

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.inner.core(q, k, v, call)

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.inner.finish(out, q, k, v, call) + self.near(v, call)

    def near(self, v: Tensor, call: Call) -> Tensor:
        return self.conv(values_at_queries(call.keep(v), call), call.grid)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        out = self.inner.fused(q, k, v, call)
        return out if isinstance(out, str) else out + self.near(v, call).to(out.dtype)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return self.inner.implied_map(q, k, call)

    def macs(self, size: Size) -> int:
        return self.inner.macs(size) + self.conv.macs(size)

    def after_projection(self, out: Tensor, q: Tensor) -> Tensor:
        return self.inner.after_projection(out, q)

    def between(self, x: Tensor, grid: TokenGrid) -> Tensor:
        return self.inner.between(x, grid)

    def between_macs(self, size: Size) -> int:
        return self.inner.between_macs(size)
