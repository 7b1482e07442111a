"""VOLO's self-attention over pictures and its class attention.

Exact for softmax. Class attention is linear already: mechanisms that cannot serve a single query without a place (see
CaiT) leave it as it is. The outlookers of the first stage have no keys, they predict the weights of 3×3 neighbours from
the centre alone, and stay.
"""

from __future__ import annotations

from typing import Any

from timm.models.volo import Attention, ClassAttention
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, one_query_ask


class VOLOHost(Host, Attention):
    original = Attention

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[1:3])

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        grid, x = TokenGrid(height, width), x.flatten(1, 2)
        q, k, v = self.qkv(x).reshape(batch, grid.tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.proj(self.attend(q, k, v, grid, x=x).transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q)).unflatten(1, (height, width))


class VOLOClassHost(Host, ClassAttention):
    original = ClassAttention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.q.in_features)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [one_query_ask(), *dropout_ask(module)]

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid.line(args[0].shape[1])

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q(first).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = self.attend(q, k, v, None, x=first)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))
