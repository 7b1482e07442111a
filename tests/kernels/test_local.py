"""The local branch as a kernel against PyTorch's convolution in float64: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import GridConv, TokenConv, TokenGrid
from linvit.errors import LinvitError
from linvit.kernels.local import Grid, filtered, prepare, prepare_weight_gradient, signature_of, why_not
from tests.kernels.linear_reference import draw, error

HEADS, WIDTH = 3, 20
CASES = {  # shapes of weight and bias, and the grid
    "tokens": ((1, HEADS, 1, 9, 1), None, Grid(22, 1)),
    "grid": ((1, HEADS, WIDTH, 3, 3), (1, HEADS, WIDTH), Grid(4, 5, 2)),
    "heads share": ((1, 1, WIDTH, 5, 5), (1, 1, WIDTH), Grid(7, 3, 1)),
    "images": ((2, HEADS, WIDTH, 3, 3), None, Grid(11, 2)),
}
every = pytest.mark.parametrize("name", CASES)


def exactly(v: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
    batch, heads, _, width = v.shape
    channels = batch * heads * width
    picture = v[:, :, grid.prefix :].transpose(2, 3).reshape(1, channels, grid.height, grid.width)
    taps = weight.expand(batch, heads, width, *weight.shape[3:]).reshape(channels, 1, *weight.shape[3:])
    shift = None if bias is None else bias.expand(batch, heads, width).reshape(channels)
    sides = tuple(size // 2 for size in weight.shape[3:])
    found = F.conv2d(picture, taps, shift, padding=sides, groups=channels)
    found = found.reshape(batch, heads, width, grid.height * grid.width).transpose(2, 3)
    return F.pad(found, (0, 0, grid.prefix, 0))


def tensors(name: str, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, Grid]:
    """onto, v as it lies in a packed projection, and the weight; the bias; the grid."""
    shape, bias_shape, grid = CASES[name]
    tokens = grid.prefix + grid.height * grid.width
    v = draw(device, dtype, 2, tokens, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)[2]
    found = [draw(device, dtype, 2, HEADS, tokens, WIDTH), v, draw(device, torch.float32, *shape)]
    bias = None if bias_shape is None else draw(device, torch.float32, *bias_shape).requires_grad_()
    return [t.detach().requires_grad_() for t in found], bias, grid


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filter_and_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    (onto, v, weight), bias, grid = tensors(name, device, dtype)
    leaves = [onto, v, weight, *([] if bias is None else [bias])]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    out = filtered(v, weight, bias, grid, onto)
    exact = exact_leaves[0] + exactly(*exact_leaves[1:3], exact_leaves[3] if bias is not None else None, grid)
    grad = draw(device, dtype, *out.shape, seed=5)
    found, wanted = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(exact, exact_leaves, grad.double())
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    assert error(out, exact) < (5e-3 if dtype == torch.bfloat16 else 1e-6)
    for one, other, leaf in zip(found, wanted, leaves, strict=True):
        assert one.dtype == leaf.dtype and error(one, other) < (5e-3 if dtype == torch.bfloat16 else 1e-5)


def test_without_a_base(device: torch.device) -> None:
    grid, bias = Grid(22, 1), draw(device, torch.float32, 1, 1, WIDTH)
    v, weight = draw(device, torch.float32, 2, HEADS, 22, WIDTH), draw(device, torch.float32, 1, 1, WIDTH, 1, 1)
    torch.testing.assert_close(filtered(v, weight, bias, grid), v * weight[0, 0, :, 0, 0] + bias[0, 0])


@pytest.mark.parametrize("repeated", [False, True])
def test_several_images_and_stretches_of_tokens_in_a_weight_gradient(repeated: bool, device: torch.device) -> None:
    """Parts of the sum over images and over patches, and channels of several programs; or a filter for each image,
    which are all the same memory."""
    grid = Grid(20, 1)
    v, weight = (
        draw(device, torch.float32, 18, 1, 20, 150),
        draw(device, torch.float32, 1, 1, 150, 3, 1).requires_grad_(),
    )
    each = weight.expand(18, -1, -1, -1, -1) if repeated else weight
    found, wanted = (run(v, each, None, grid).square().sum() for run in (filtered, exactly))
    (one,), (other,) = torch.autograd.grad(found, weight), torch.autograd.grad(wanted, weight)
    assert error(one, other) < 1e-5


def test_as_many_images_as_windows_make(device: torch.device) -> None:
    """A grid of programs has room for 65,535 in its second and third axis."""
    v = torch.empty(2**16, 3, 4, 8, device="meta")
    signature = signature_of(v, v.new_empty(1, 3, 8, 3, 3), None, None, v, Grid(2, 2))
    launches = [prepare(signature, False), prepare_weight_gradient(signature, 132)[0]]
    assert all(max(launch.grid[1:]) < 2**16 and min(launch.grid) > 0 for launch in launches)


def test_compiles_and_passes_opcheck(device: torch.device) -> None:
    (onto, v, weight), bias, grid = tensors("grid", device, torch.float32)
    torch.library.opcheck(torch.ops.linvit.local_filter.default, (onto, v, weight, bias, *grid))
    turned = weight.detach().mT.requires_grad_()
    torch.library.opcheck(torch.ops.linvit.local_filter.default, (onto, v, turned, bias, *grid))
    torch._dynamo.reset()
    compiled = torch.compile(filtered, fullgraph=True, backend="aot_eager")
    leaves = (onto, v, weight)
    found, wanted = (
        torch.autograd.grad(run(v, weight, bias, grid, onto).sin().sum(), leaves) for run in (compiled, filtered)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("conv", [TokenConv(HEADS, 9), GridConv(WIDTH, 5), GridConv(HEADS * WIDTH, 3)], ids=str)
def test_the_modules_filters(conv: TokenConv | GridConv, device: torch.device) -> None:
    conv, grid = conv.to(device), TokenGrid(4, 5, 2)
    v = draw(device, torch.float32, 2, HEADS, grid.tokens, WIDTH)
    with torch.no_grad():
        found = filtered(v, *conv.filters(HEADS, WIDTH), conv.over(grid))
        torch.testing.assert_close(found, conv.local(v, grid), atol=1e-5, rtol=1e-5)


def test_refusals(device: torch.device) -> None:
    (onto, v, weight), bias, grid = tensors("grid", device, torch.float32)
    assert why_not(v, weight) is None
    assert "float64" in str(why_not(v.double(), weight)) and "empty" in str(why_not(v[:0], weight))
    assert "too large" in str(why_not(v, weight.new_zeros(1, 1, 1, 17, 17)))
    plain = torch.ops.linvit.local_filter(onto, v, weight, bias, *grid)
    for out in (filtered(v, weight, bias, grid, onto), plain):
        with pytest.raises(LinvitError, match="twice"):
            torch.autograd.grad(out.sum(), v, create_graph=True)
