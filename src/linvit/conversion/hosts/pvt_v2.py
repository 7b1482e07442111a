"""PVTv2's attention. Keys and values come from a strided convolution; `drop=("pooling",)` takes it out, and the
mechanism then sees every token as key, which is how Mobile-Attention's PVTv2-b2 loses its 4.3 M parameters."""

from __future__ import annotations

from typing import Any

from timm.models.pvt_v2 import Attention
from torch import Tensor

from linvit.attention import TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import Host, grid_of, to_tokens, unpack


class PooledKeysHost(Host):
    """Keys and values from a picture that a strided convolution has shrunk."""

    features = {"pooling": ("sr", "norm")}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[1]
        stride = 1 if module.sr is None else module.sr.stride[0]
        return TokenGrid(height // stride, width // stride)

    def _pool(self, picture: Tensor) -> tuple[Tensor, TokenGrid]:
        picture = self.sr(picture)
        return self.norm(to_tokens(picture)), grid_of(picture)

    def forward(self, x: Tensor, size: Any) -> Tensor:
        grid = TokenGrid(size[0], size[1])
        source, key_grid = (x, grid) if self.sr is None else self._pool(grid.to_map(x[:, None]))
        q = self.split_heads(self.q(x))
        k, v = unpack(self.kv(source), 2, self.num_heads)
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        return self.proj_drop(self.project_out(out, q))


class PVTv2Host(PooledKeysHost, Attention):
    original = Attention
    features = {"pooling": ("sr", "norm", "pool", "act")}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return PooledKeysHost.grid(module, args, image) if module.pool is None else TokenGrid(7, 7)

    def _pool(self, picture: Tensor) -> tuple[Tensor, TokenGrid]:
        source, grid = super()._pool(picture if self.pool is None else self.pool(picture))
        return source if self.act is None else self.act(source), grid
