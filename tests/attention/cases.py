"""Every mechanism in every variant and example, for the registry-wide tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from linvit.attention import Mechanism, TokenGrid, create_attention, list_mechanisms, mechanism_class

HEADS, HEAD_DIM = 2, 8


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    def build(
        self,
        grid: TokenGrid,
        *,
        heads: int = HEADS,
        head_dim: int = HEAD_DIM,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        impl: str = "auto",
        seed: int = 0,
    ) -> Mechanism:
        """The mechanism in eval mode, every parameter moved off its initial value so that zeros hide nothing."""
        torch.manual_seed(seed)
        mechanism = create_attention(
            self.name, heads=heads, head_dim=head_dim, value_dim=value_dim, grid=grid, impl=impl, **self.options
        )
        for parameter in mechanism.parameters():
            if parameter.requires_grad:
                parameter.data += 0.3 * torch.randn_like(parameter)
        return mechanism.to(dtype).eval()


def cases() -> list[Case]:
    found = []
    for name in list_mechanisms():
        cls = mechanism_class(name)
        options = list(cls.examples)
        options += [{"variant": v} for v in cls.variants[1:] if {"variant": v} not in options]
        found += [Case(name, o) for o in options]
    return [
        *found,
        *(Case(name, {"local": 3}) for name in ("softmax", "stella", "castling", "linformer", "xca", "mobile")),
        *(Case(name, {"dynamic": 3}) for name in ("relu_linear", "castling")),
        *(Case(name, {"centre": True}) for name in ("relu_linear", "hedgehog")),
    ]


def inputs(
    grid: TokenGrid,
    *,
    key_grid: TokenGrid | None = None,
    batch: int = 2,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and block input x, drawn in float64 so that every dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    keys = (key_grid or grid).tokens

    def draw(*shape: int) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    q = draw(batch, heads, grid.tokens, head_dim)
    k = draw(batch, heads, keys, head_dim)
    v = draw(batch, heads, keys, value_dim or head_dim)
    return q, k, v, draw(batch, grid.tokens, heads * head_dim)


def call(mechanism: Mechanism, tensors: tuple[Tensor, ...], grid: TokenGrid | None, **kwargs: Any) -> Tensor:
    q, k, v, x = tensors
    if mechanism.capabilities.input:
        kwargs["x"] = x
    return mechanism(q, k, v, grid, **kwargs)


def relative_rms(out: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    out, reference = out.detach(), reference.detach()
    return float(((out.double() - reference).pow(2).mean() / reference.pow(2).mean().clamp_min(1e-300)).sqrt())


def supported(case: Case, grid: TokenGrid) -> TokenGrid:
    """The grid, without its prefix where the mechanism has no place for one."""
    return grid if case.build(grid).capabilities.prefix else replace(grid, prefix=0)


every = pytest.mark.parametrize("case", cases(), ids=str)
