"""PVTv2's attention. Keys and values come from a strided convolution; `drop=("pooling",)` takes it out, and the
mechanism then sees every token as key, which is how Mobile-Attention's PVTv2-b2 loses its 4.3 M parameters."""

from __future__ import annotations

from typing import Any

from timm.models.pvt_v2 import Attention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, unequal_ask


class PVTv2Host(Host, Attention):
    original = Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.dim)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        pooled = [unequal_ask("pooling", droppable=True)] if module.sr is not None else []
        return pooled + dropout_ask(module)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "pooling":
            module.pool = module.sr = module.norm = module.act = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[1]
        if module.pool is not None:
            return TokenGrid(7, 7)
        stride = 1 if module.sr is None else module.sr.stride[0]
        return TokenGrid(height // stride, width // stride)

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        batch, tokens, channels = x.shape
        grid = TokenGrid(feat_size[0], feat_size[1])
        q = self.q(x).reshape(batch, tokens, self.num_heads, -1).transpose(1, 2)
        source, key_grid = x, grid
        if self.sr is not None:
            picture = x.transpose(1, 2).reshape(batch, channels, grid.height, grid.width)
            picture = self.sr(picture if self.pool is None else self.pool(picture))
            key_grid = TokenGrid(picture.shape[-2], picture.shape[-1])
            source = self.norm(picture.flatten(2).transpose(1, 2))
            source = source if self.act is None else self.act(source)
        kv = self.kv(source).reshape(batch, -1, 2, self.num_heads, self.head_dim)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        out = self.proj(out.transpose(1, 2).reshape(batch, tokens, channels))
        return self.proj_drop(self.mechanism.after_projection(out, q))
