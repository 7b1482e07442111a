"""Same bits while the chip is busy with something else: what is not waited for shows only then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linvit.kernels.angular import angular
from linvit.kernels.mobile import mobile
from linvit.kernels.relu_quadratic import relu_quadratic
from tests.kernels.linear_reference import FORMULAS, draw, inputs, linear_attention

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    (BF16, 2, 3, 197, 24),
    (FP16, 2, 3, 197, 24),
    (FP16, 64, 3, 257, 64),
    (BF16, 64, 3, 257, 64),
    (BF16, 4, 6, 197, 96),
]
ROUNDS = 300


def with_gradients(out: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    grad = draw(out.device, out.dtype, *out.shape, seed=7)
    return (out, *torch.autograd.grad(out, tensors, grad))


def steady(call: Callable[[], tuple[Tensor, ...]]) -> int:
    """How many of the calls beside large matrix products differ from the first, which has the chip for itself."""
    first = [tensor.clone() for tensor in call()]
    torch.cuda.synchronize()
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=BF16) for _ in range(2))
    other = torch.cuda.Stream()
    differ = torch.zeros((), device="cuda", dtype=torch.int64)
    for number in range(ROUNDS):
        if number % 10 == 0:
            with torch.cuda.stream(other):
                for _ in range(4):
                    left @ right
        junk = torch.full((1 + number * 1000,), float("nan"), device="cuda", dtype=BF16)  # where results will lie
        del junk
        now = call()
        differ += torch.stack([(a != b).any() for a, b in zip(now, first, strict=True)]).any()
    return int(differ)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, batch, heads, tokens, dim", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_linear_attention(name: str, dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int) -> None:
    tensors = inputs(torch.device("cuda"), dtype, batch, heads, tokens, dim)
    constant = torch.tensor(0.7, device="cuda") if name == "qt" else None
    assert steady(lambda: with_gradients(linear_attention(*tensors, FORMULAS[name], None, constant), tensors)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, batch, heads, tokens, dim", [*SHAPES, (BF16, 2, 3, 197, 160)], ids=str)
def test_relu_quadratic(dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int) -> None:
    tensors = inputs(torch.device("cuda"), dtype, batch, heads, tokens, dim)
    assert steady(lambda: with_gradients(relu_quadratic(*tensors), tensors)) == 0
    bias = draw(torch.device("cuda"), dtype, 1, heads, tokens, tokens, seed=4).requires_grad_()
    assert steady(lambda: with_gradients(relu_quadratic(*tensors, None, bias), [*tensors, bias])) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, batch, heads, tokens, dim", [*SHAPES, (BF16, 2, 3, 197, 160)], ids=str)
def test_angular(dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int) -> None:
    tensors = inputs(torch.device("cuda"), dtype, batch, heads, tokens, dim)
    assert steady(lambda: with_gradients(angular(*tensors), tensors)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_mobile(dtype: torch.dtype) -> None:
    tensors = inputs(torch.device("cuda"), dtype, 8, 6, 196, 64)
    assert steady(lambda: with_gradients(mobile(*tensors, 4), tensors)) == 0
