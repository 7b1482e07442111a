"""The formulas of the fused linear attention in plain float64, and what tests hold against them."""

from __future__ import annotations

from math import pi

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.kernels.linear import Formula, linear_attention

FORMULAS = {
    "stella": Formula("relu", scale=0.01),
    "relu": Formula("relu", row_sum=True, eps=1e-6),
    "cosformer": Formula("relu", row_sum=True, clamp=True, eps=1e-6),
    "elu": Formula("elu_plus_one", row_sum=True, eps=1e-6),
    "sigmoid": Formula("sigmoid", row_sum=True),
    "angular": Formula("direction", scale=1 / pi, feature_eps=1e-6, own=0.5, norm=True, norm_eps=1e-6),
    "qt": Formula("square", row_sum=True, eps=1e-15, feature_eps=1e-15),
    "efficient": Formula("softmax"),
    "factorised": Formula("key_softmax", scale=0.5),
    "identity": Formula("identity", scale=0.1),
}
every = pytest.mark.parametrize("name", FORMULAS)
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)


def reference(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None
) -> Tensor:
    """The formula as it is written, in the dtype it gets."""
    features = {
        "relu": torch.relu,
        "elu_plus_one": lambda x: F.elu(x) + 1,
        "sigmoid": torch.sigmoid,
        "direction": lambda x: F.normalize(x, dim=-1, eps=formula.feature_eps),
        "square": lambda x: F.normalize(x**2, dim=-1, eps=1e-300),
        "identity": lambda x: x,
    }
    if formula.feature in ("softmax", "key_softmax"):
        held = k if mask is None else k.masked_fill(~mask[:, None, :, None], float("-inf"))
        phi_q, phi_k = q.softmax(-1) if formula.feature == "softmax" else q, held.softmax(-2)
    else:
        phi_q, phi_k = features[formula.feature](q), features[formula.feature](k)
    keys: int | Tensor = k.shape[2]
    if mask is not None:
        keep = mask[:, None, :, None]
        phi_k, v, keys = torch.where(keep, phi_k, 0), torch.where(keep, v, 0), keep.sum(2, keepdim=True)
    out = phi_q @ (phi_k.transpose(-2, -1) @ v)
    if constant is not None:
        out = out + constant * v.sum(2, keepdim=True)
    if formula.row_sum:
        total = phi_q @ phi_k.sum(2).unsqueeze(-1)
        if constant is not None:
            total = total + constant * keys
        out = out / (total.clamp_min(formula.eps) if formula.clamp else total + formula.eps)
    out = out * formula.scale
    if formula.own:
        out = out + formula.own * v
    return F.normalize(out, dim=-1, eps=formula.norm_eps) if formula.norm else out


def error(found: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp_min(least))


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)


def inputs(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, queries: int, dim: int,
    keys: int | None = None, value_dim: int | None = None,
) -> list[Tensor]:  # fmt: skip
    keys, value_dim = keys or queries, value_dim or dim
    shapes = ((queries, dim), (keys, dim), (keys, value_dim))
    return [draw(device, dtype, batch, heads, *s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def compare(name: str, tensors: list[Tensor], mask: Tensor | None = None) -> None:
    """Output and gradients within the promised distance of float64."""
    formula, dtype = FORMULAS[name], tensors[0].dtype
    constant = torch.tensor(0.7, device=tensors[0].device, requires_grad=True) if name == "qt" else None
    leaves = [*tensors, constant] if constant is not None else tensors
    out = linear_attention(*tensors, formula, mask, constant)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact = reference(*exact_leaves[:3], formula, mask, exact_leaves[3] if constant is not None else None)
    grad = draw(out.device, dtype, *out.shape, seed=7)
    found, wanted = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(exact, exact_leaves, grad.double())
    assert out.dtype == dtype and out.shape == exact.shape
    assert error(out, exact) < (5e-3 if dtype in HALF else 1e-5)
    for letter, one, other in zip(("dq", "dk", "dv", "dc"), found, wanted, strict=False):
        # With one key or one feature a row sum leaves nothing of dq and dk: that nothing is held to d out instead, and
        # where features are squares that are normalised to rounding over the smallest number.
        least = (1e-2 if formula.feature == "square" else 1e-3) * float(grad.norm())
        assert error(one, other, least) < (1e-2 if dtype in HALF else 1e-4), letter
