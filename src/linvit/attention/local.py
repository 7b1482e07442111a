"""Local branches: what a mechanism adds from the values near each token.

Each takes the values `(batch, heads, keys, value_dim)` and returns them at the queries. Prefix tokens have no place on
the grid: branches over the grid add nothing to them.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.mechanism import Call, Mechanism, Shape, Size, TokenGrid
from linvit.errors import LinvitError


def run(module: nn.Module, x: Tensor) -> Tensor:
    """A submodule with parameters on lifted `x`: in the parameters' own dtype, the result back in x's."""
    dtype = next(module.parameters()).dtype
    return module(x.to(dtype)).to(x.dtype)


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
    """A depthwise convolution over the patch grid. With the channels of one head, its filters are shared by all."""

    def __init__(self, channels: int, kernel_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=bias)

    def forward(self, v: Tensor, grid: TokenGrid) -> Tensor:
        batch, heads, _, width = v.shape
        prefix, patches = grid.split(v)
        picture = grid.to_map(patches)
        channels = self.conv.in_channels
        pictures = batch * heads * width // channels
        local = run(self.conv, picture.reshape(pictures, channels, grid.height, grid.width))
        local = grid.from_map(local.reshape(batch, heads * width, grid.height, grid.width), heads)
        return torch.cat((torch.zeros_like(prefix), local), dim=2) if grid.prefix else local

    def macs(self, size: Size) -> int:
        return size.batch * size.heads * size.grid.patches * size.value_dim * self.kernel_size**2


def filter_each(v: Tensor, kernels: Tensor, grid: TokenGrid) -> Tensor:
    """Values on the grid convolved with filters of each image's own, `(batch, heads · channels, size, size)`."""
    batch, heads, _, width = v.shape
    if not batch:  # a convolution of no groups is an error
        return v.new_zeros(0, heads, grid.tokens, width)
    _, patches = grid.split(v)
    picture = grid.to_map(patches).reshape(1, batch * heads * width, grid.height, grid.width)
    kernels = kernels.reshape(picture.shape[1], 1, *kernels.shape[-2:])
    local = F.conv2d(picture, kernels, padding=kernels.shape[-1] // 2, groups=picture.shape[1])
    local = grid.from_map(local.reshape(batch, heads * width, grid.height, grid.width), heads)
    return F.pad(local, (0, 0, grid.prefix, 0))


class DynamicConv(nn.Module):
    """A depthwise convolution over the patch grid by filters that a small MLP makes of an image's mean values."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.channels, self.kernel_size, self.hidden = channels, kernel_size, max(1, channels // 8)
        self.filters = nn.Sequential(
            nn.Linear(channels, self.hidden), nn.SiLU(), nn.Linear(self.hidden, channels * kernel_size**2)
        )
        for parameter in self.filters[2].parameters():
            nn.init.zeros_(parameter)

    def forward(self, v: Tensor, call: Call) -> Tensor:
        kept = call.keep(v)
        mean = (kept.sum(-2, keepdim=True) / call.keys).flatten(1)
        kernels = run(self.filters, mean).unflatten(1, (self.channels, self.kernel_size, self.kernel_size))
        return filter_each(values_at_queries(kept, call), kernels, call.grid)

    def macs(self, size: Size) -> int:
        mlp = self.channels * self.hidden * (1 + self.kernel_size**2)
        return size.batch * (mlp + self.channels * size.grid.patches * self.kernel_size**2)


SILU_ONE = 1.2784645427610738  # where SiLU is one


class Gate(nn.Module):
    """The output times a linear map of the block's input, or the SiLU of it."""

    def __init__(self, shape: Shape, activation: str = "") -> None:
        super().__init__()
        self.activation = activation
        self.linear = nn.Linear(shape.channels, (shape.heads or 1) * shape.values)

    def forward(self, out: Tensor, call: Call) -> Tensor:
        assert call.x is not None
        gate = run(self.linear, call.x.to(out.dtype))
        gate = F.silu(gate) if self.activation == "silu" else gate
        return out * gate.unflatten(2, (out.shape[1], out.shape[3])).transpose(1, 2)

    def open(self) -> None:
        """Let it pass everything as it is."""
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, SILU_ONE if self.activation == "silu" else 1.0)

    def macs(self, size: Size) -> int:
        return size.batch * size.queries * self.linear.in_features * self.linear.out_features


class NormShortcut(nn.Module):
    """QT-ViT's non-linear shortcut GELU(BatchNorm(v)), the norm shared by the heads."""

    def __init__(self, value_dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(value_dim)

    def forward(self, v: Tensor) -> Tensor:
        return F.gelu(run(self.norm, v.reshape(-1, v.shape[-1]))).reshape(v.shape)


def begin_at_zero(mechanism: nn.Module) -> None:
    """Let the local branches of a mechanism add nothing at first, and its gate take nothing. A pretrained model has no
    use for random ones; they learn from the first step on all the same."""
    for module in mechanism.modules():
        if isinstance(module, Gate):
            module.open()
        if isinstance(module, GridConv | TokenConv | NormShortcut):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)


class WithLocal(Mechanism):
    """Any mechanism with a local branch, `create_attention(name, local=3)`: `out = mechanism(q, k, v) + conv(v)`.

    The convolution is depthwise over the patch grid, as wide as asked for, and zero at first: a converted model begins
    as it would without. What linear attention lacks most is a sharp look at the neighbourhood, and this costs next to
    nothing. The mechanism inside does all it did; one whose paper has a branch of its own keeps it beside this one.
    """

    def __init__(self, inner: Mechanism, kernel_size: int) -> None:
        self.name, self.paper = inner.name, inner.paper  # type: ignore[misc]
        super().__init__(inner.shape)
        self.require("heads", "head_dim")
        self.built_for |= inner.built_for
        self.variant, self.triton, self.inner = inner.variant, inner.triton, inner
        self.capabilities = replace(inner.capabilities, grid=True, equivariant=False)
        self.conv = self.branch((inner.shape.heads or 1) * inner.shape.values, kernel_size)

    def branch(self, channels: int, kernel_size: int) -> Any:
        conv = GridConv(channels, kernel_size, bias=False)
        nn.init.zeros_(conv.conv.weight)
        return conv

    def enter(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Call]:
        return self.inner.enter(q, k, call)

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

    @property
    def adds_behind(self) -> bool:
        return self.inner.adds_behind

    def between(self, x: Tensor, grid: TokenGrid) -> Tensor:
        return self.inner.between(x, grid)

    def between_macs(self, size: Size) -> int:
        return self.inner.between_macs(size)


class WithDynamic(WithLocal):
    """Any mechanism with a local branch whose filters depend on the image, `create_attention(name, dynamic=3)`.

    As JetViT's (CVPR 2026), which says what makes the filters and not how large it is: an MLP of the mean values, with
    an eighth of their channels inside (inferred). Zero at first.
    """

    def branch(self, channels: int, kernel_size: int) -> Any:
        return DynamicConv(channels, kernel_size)

    def near(self, v: Tensor, call: Call) -> Tensor:
        return self.conv(v, call)
