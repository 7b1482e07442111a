"""CrossViT's cross-attention: the class token of one branch asks the patches of the other.

One query is linear in the tokens with any mechanism. Exact for softmax; a mechanism that needs as many keys as queries
leaves it as it is. The self-attention of the branches is timm's shared one. Any input size, as the model rescales the
image itself.
"""

from __future__ import annotations

from typing import Any

from timm.models.crossvit import CrossAttention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, one_query_ask
from linvit.conversion.pictures import follow_pictures


class CrossViTHost(Host, CrossAttention):
    original = CrossAttention

    @staticmethod
    def shape(module: Any) -> Shape:
        width = module.wq.in_features
        return Shape(module.num_heads, width // module.num_heads, dim=width)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [one_query_ask(), *dropout_ask(module)]

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_pictures(model, cls)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (self.wq(first), self.wk(x), self.wv(x))
        )
        keys = self.grids.grid if self.grids is not None else None
        out = self.attend(q, k, v, TokenGrid(1, 1), key_grid=keys, x=first)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))
