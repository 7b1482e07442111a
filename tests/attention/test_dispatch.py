"""Which implementation a linear mechanism takes on the CPU, and that none of it needs Triton."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import create_attention
from linvit.errors import LinvitError


def flops(impl: str, tokens: int, dim: int) -> int:
    x = torch.randn(1, 2, tokens, dim)
    with FlopCounterMode(display=False) as counter:
        create_attention("stella", impl=impl)(x, x, x)
    return counter.get_total_flops()


@pytest.mark.parametrize("tokens, dim", [(16, 32), (32, 32), (33, 32), (64, 16)])
def test_cpu_multiplies_in_the_cheaper_order(tokens: int, dim: int) -> None:
    linear, quadratic = 2 * 2 * 2 * tokens * dim**2, 2 * 2 * 2 * tokens**2 * dim
    assert flops("reference", tokens, dim) == linear
    assert flops("auto", tokens, dim) == min(linear, quadratic)


@pytest.mark.parametrize("name", ["stella", "relu_linear", "qt", "castling"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_both_orders_agree(name: str, tokens: int) -> None:
    q, k, v = torch.randn(3, 2, 4, tokens, 16).unbind(0)
    options = {"heads": 4, "head_dim": 16}
    one, other = (create_attention(name, impl=impl, **options) for impl in ("auto", "reference"))
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(q, k, v), other(q, k, v))


def test_triton_is_refused_on_the_cpu_with_the_reason() -> None:
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(LinvitError, match="stella cannot run on the Triton kernel: the tensors are on cpu"):
        create_attention("stella", impl="triton")(x, x, x)


def test_works_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, linvit\n"
        "x = torch.randn(1, 2, 9, 8)\n"
        "assert linvit.create_attention('stella')(x, x, x).shape == x.shape\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
