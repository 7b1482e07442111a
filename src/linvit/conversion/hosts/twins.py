"""Twins: `LocallyGroupedAttn` inside windows and `GlobalSubSampleAttn` with keys from a strided convolution.

Exact for softmax, at any input size. Windows that hang over the edge see zero padding as tokens, as in the original.
`drop=("pooling",)` takes the strided convolution out, and the mechanism then sees every token as key.
"""

from __future__ import annotations

from typing import Any

from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, unequal_ask


class TwinsLocalHost(Host, LocallyGroupedAttn):
    original = LocallyGroupedAttn

    @staticmethod
    def shape(module: Any) -> Shape:
        grid = TokenGrid(module.ws, module.ws)
        return Shape(module.num_heads, module.dim // module.num_heads, dim=module.dim, grid=grid)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        batch, tokens, channels = x.shape
        (height, width), side = size, self.ws
        picture = F.pad(x.reshape(batch, height, width, channels), (0, 0, 0, -width % side, 0, -height % side))
        rows, columns = picture.shape[1] // side, picture.shape[2] // side
        windows = picture.reshape(batch, rows, side, columns, side, channels).transpose(2, 3)
        windows = windows.reshape(-1, side * side, channels)
        qkv = self.qkv(windows).reshape(len(windows), side * side, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, TokenGrid(side, side), x=windows)
        out = self.mechanism.after_projection(self.proj(out.transpose(1, 2).flatten(2)), q)
        out = out.reshape(batch, rows, columns, side, side, channels).transpose(2, 3)
        out = out.reshape(batch, rows * side, columns * side, channels)[:, :height, :width]
        return self.proj_drop(out.reshape(batch, tokens, channels))


class TwinsGlobalHost(Host, GlobalSubSampleAttn):
    original = GlobalSubSampleAttn

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.dim // module.num_heads, dim=module.dim)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        pooled = [unequal_ask("pooling", droppable=True)] if module.sr is not None else []
        return pooled + dropout_ask(module)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "pooling":
            module.sr = module.norm = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[1]
        stride = 1 if module.sr is None else module.sr.stride[0]
        return TokenGrid(height // stride, width // stride)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        grid = TokenGrid(size[0], size[1])
        source, key_grid = x, grid
        if self.sr is not None:
            picture = self.sr(grid.to_map(x[:, None]))
            key_grid = TokenGrid(picture.shape[-2], picture.shape[-1])
            source = self.norm(picture.flatten(2).transpose(1, 2))
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(source).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))
