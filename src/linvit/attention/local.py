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
from linvit.kernels import local as kernel
from linvit.kernels import norm_gelu
from linvit.kernels.fused import exporting
from linvit.kernels.local import Grid


def run(module: nn.Module, x: Tensor) -> Tensor:
    """A submodule with parameters on lifted `x`: in the parameters' own dtype, the result back in x's."""
    dtype = next(module.parameters()).dtype
    return module(x.to(dtype)).to(x.dtype)


def values_at_queries(v: Tensor, call: Call) -> Tensor:
    """v at the queries' positions. Inferred, for hosts that pool: queries that are every s-th token take those
    tokens' values; where keys are pooled, v's picture is resized bilinearly. Prefix tokens pass through."""
    grid, key_grid = call.grid, call.key_grid
    if call.one_grid:
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


class Filter:
    """A depthwise convolution of the values, in PyTorch and as a kernel: `add` is where all mechanisms come by."""

    def filters(self, heads: int, width: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as the kernel takes them: `(1, heads, width, rows, columns)`, what is shared of size one."""
        raise NotImplementedError

    def over(self, grid: TokenGrid) -> Grid:
        """The grid that the filter runs over."""
        raise NotImplementedError

    def local(self, v: Tensor, grid: TokenGrid) -> Tensor:
        """The filtered values, in PyTorch."""
        raise NotImplementedError

    def add(self, out: Tensor, v: Tensor, call: Call) -> Tensor:
        """`out` and the filtered values at the queries."""
        return add_filtered(out, values_at_queries(call.keep(v), call), call, self)


def add_filtered(out: Tensor, v: Tensor, call: Call, by: Filter) -> Tensor:
    """The one place where a local branch takes the kernel or PyTorch; v is at the queries."""
    weight, bias = by.filters(v.shape[1], v.shape[3])
    if not call.kernels or out.dtype != v.dtype or exporting() or kernel.why_not(v, weight) is not None:
        return out + by.local(v, call.grid)
    return kernel.filtered(v, weight, bias, by.over(call.grid), out)


class TokenConv(nn.Module, Filter):
    """A 1-D convolution along the raster order, all tokens included: one filter per head, shared by its channels."""

    def __init__(self, heads: int, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.conv = nn.Conv2d(heads, heads, (kernel_size, 1), padding=(kernel_size // 2, 0), groups=heads, bias=False)

    def forward(self, v: Tensor) -> Tensor:
        return run(self.conv, v)

    def local(self, v: Tensor, grid: TokenGrid) -> Tensor:
        return self(v)

    def filters(self, heads: int, width: int) -> tuple[Tensor, Tensor | None]:
        return self.conv.weight.view(1, heads, 1, self.kernel_size, 1), None

    def over(self, grid: TokenGrid) -> Grid:
        return Grid(grid.tokens, 1)

    def macs(self, size: Size) -> int:
        return size.batch * size.heads * size.queries * size.value_dim * self.kernel_size


class GridConv(nn.Module, Filter):
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

    def local(self, v: Tensor, grid: TokenGrid) -> Tensor:
        return self(v, grid)

    def filters(self, heads: int, width: int) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.conv.weight, self.conv.bias
        weight = weight.view(1, -1, width, self.kernel_size, self.kernel_size)
        return weight, None if bias is None else bias.view(1, -1, width)

    def over(self, grid: TokenGrid) -> Grid:
        return Grid(grid.height, grid.width, grid.prefix)

    def macs(self, size: Size) -> int:
        return size.batch * size.heads * size.grid.patches * size.value_dim * self.kernel_size**2


class ImageFilters(Filter):
    """Filters of each image's own, `(batch, heads · channels, size, size)`, over the patch grid."""

    def __init__(self, kernels: Tensor) -> None:
        self.kernels = kernels

    def local(self, v: Tensor, grid: TokenGrid) -> Tensor:
        return filter_each(v, self.kernels, grid)

    def filters(self, heads: int, width: int) -> tuple[Tensor, Tensor | None]:
        return self.kernels.unflatten(1, (heads, width)), None

    def over(self, grid: TokenGrid) -> Grid:
        return Grid(grid.height, grid.width, grid.prefix)


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

    def add(self, out: Tensor, v: Tensor, call: Call) -> Tensor:
        """`out` and the filtered values at the queries."""
        kept = call.keep(v)
        mean = (kept.sum(-2, keepdim=True) / call.keys).flatten(1)
        kernels = run(self.filters, mean).unflatten(1, (self.channels, self.kernel_size, self.kernel_size))
        return add_filtered(out, values_at_queries(kept, call), call, ImageFilters(kernels))

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

    def for_kernel(self, v: Tensor, call: Call) -> norm_gelu.Norm | None:
        """The norm as the kernel takes it, in training with the statistics of v, by which it updates the running ones.
        None where PyTorch's norm has to run: it is of another kind, as one of many processes, or it refuses v."""
        norm = self.norm
        mean, var = running = (norm.running_mean, norm.running_var)
        if type(norm) is not nn.BatchNorm1d or not norm.affine or not call.one_grid or exporting():
            return None
        own = norm.training or (mean is None and var is None)
        if (mean is None) != (var is None) or (own and v.numel() <= v.shape[-1]):
            return None
        if norm_gelu.why_not_norm(v, *running, norm.weight, norm.bias) is not None:
            return None
        if own:
            tracked = norm.training and norm.track_running_stats
            counted = (*running, norm.num_batches_tracked) if tracked else (None, None, None)
            mean, var = norm_gelu.batch_moments(v, *counted, norm.momentum)
        assert mean is not None and var is not None
        return norm_gelu.Norm(mean, var, norm.weight, norm.bias, norm.eps, own)

    def add(self, out: Tensor, v: Tensor, call: Call) -> Tensor:
        """`out` and the shortcut at the queries, in PyTorch."""
        return out + values_at_queries(self(v), call)


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
        return self.conv.add(self.inner.finish(out, q, k, v, call), v, call)  # type: ignore[no-any-return]

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        out = self.inner.fused(q, k, v, call)
        return out if isinstance(out, str) else self.conv.add(out, v, call)

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
