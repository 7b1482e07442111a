"""Local branches: what a mechanism adds from the values near each token.

Each takes the values `(batch, heads, keys, value_dim)` and returns them at the queries. Prefix tokens have no place on
the grid: branches over the grid add nothing to them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.grid import TokenGrid
from linvit.attention.mechanism import Call, Size, run
from linvit.errors import LinvitError


def values_at_queries(v: Tensor, call: Call) -> Tensor:
    """v at the queries' positions. Inferred, for hosts that pool: queries that are every s-th token take those
    tokens' values; where keys are pooled, v's picture is resized bilinearly. Prefix tokens pass through."""
    grid, key_grid = call.grid, call.key_grid
    if grid == key_grid:
        return v
    if grid.prefix != key_grid.prefix:
        raise LinvitError(f"queries have {grid.prefix} prefix tokens and keys {key_grid.prefix}: cannot line them up")
    prefix, patches = key_grid.split(v)
    rows, columns = -(-key_grid.height // grid.height), -(-key_grid.width // grid.width)
    picture = key_grid.to_map(patches)
    strided = (-(-key_grid.height // rows), -(-key_grid.width // columns))
    if strided == (grid.height, grid.width):
        picture = picture[:, :, ::rows, ::columns]
    else:
        picture = F.interpolate(picture, (grid.height, grid.width), mode="bilinear", align_corners=False)
    return torch.cat((prefix, grid.from_map(picture, v.shape[1])), dim=2)


BLOCK = 64  # tokens that share one product of TokenConv on a GPU


class TokenConv(nn.Module):
    """A 1-D convolution along the raster order, all tokens included: one filter per head, shared by its channels.

    On a GPU it is a product of stretches of tokens with a banded matrix: depthwise kernels there work channel by
    channel, and heads are few.
    """

    def __init__(self, heads: int, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.conv = nn.Conv2d(heads, heads, (kernel_size, 1), padding=(kernel_size // 2, 0), groups=heads, bias=False)

    def forward(self, v: Tensor) -> Tensor:
        return self.banded(v) if v.is_cuda else run(self.conv, v)

    def banded(self, v: Tensor) -> Tensor:
        batch, heads, tokens, width = v.shape
        taps, half = self.kernel_size, self.kernel_size // 2
        padded = F.pad(v, (0, 0, half, -tokens % BLOCK + half))
        stretches = padded.unfold(2, BLOCK + 2 * half, BLOCK)  # (batch, heads, blocks, width, what a block sees)
        seen, place = torch.arange(stretches.shape[-1], device=v.device), torch.arange(BLOCK, device=v.device)
        tap = torch.arange(taps, device=v.device)[:, None, None]
        weight = self.conv.weight.view(heads, taps)
        shifts = (seen[:, None] - place == tap).to(weight.dtype)
        band = (weight @ shifts.flatten(1)).view(heads, 1, len(seen), BLOCK).to(v.dtype)
        return (stretches @ band).transpose(-2, -1).reshape(batch, heads, -1, width)[:, :, :tokens]

    def macs(self, size: Size) -> int:
        return size.batch * size.heads * size.queries * size.value_dim * self.kernel_size


class GridConv(nn.Module):
    """A depthwise convolution over the patch grid. With `heads` the filters are shared by that many heads."""

    def __init__(self, channels: int, kernel_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=bias)

    def forward(self, v: Tensor, grid: TokenGrid) -> Tensor:
        batch, heads, _, width = v.shape
        prefix, patches = grid.split(v)
        picture = grid.to_map(patches)
        channels = self.conv.in_channels
        local = run(self.conv, picture.reshape(-1, channels, grid.height, grid.width))
        local = grid.from_map(local.reshape(batch, heads * width, grid.height, grid.width), heads)
        return torch.cat((torch.zeros_like(prefix), local), dim=2) if grid.prefix else local

    def macs(self, size: Size) -> int:
        return size.batch * size.heads * size.grid.patches * size.value_dim * self.kernel_size**2


class NormShortcut(nn.Module):
    """QT-ViT's non-linear shortcut GELU(BatchNorm(v)), the norm shared by the heads."""

    def __init__(self, value_dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(value_dim)

    def forward(self, v: Tensor) -> Tensor:
        return F.gelu(run(self.norm, v.reshape(-1, v.shape[-1]))).reshape(v.shape)


def begin_at_zero(mechanism: nn.Module) -> None:
    """Let the local branches of a mechanism add nothing at first. A pretrained model has no use for random ones; they
    learn from the first step on all the same."""
    for module in mechanism.modules():
        if isinstance(module, GridConv | TokenConv | NormShortcut):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
