"""NextViT's attention, with keys averaged over runs of neighbouring tokens in reading order.

Exact for softmax, any input size. The averaged keys no longer lie on a grid: mechanisms that look at one see a line.
`drop=("pooling",)` takes the averaging and its norm out, and every token is a key.
"""

from __future__ import annotations

from typing import Any

from timm.models.nextvit import EfficientAttention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, unequal_ask
from linvit.conversion.pictures import follow_pictures


class NextViTHost(Host, EfficientAttention):
    original = EfficientAttention

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
            module.sr = module.norm = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid if module.sr is None else TokenGrid.line(args[0].shape[1] // module.N_ratio)

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_pictures(model, cls)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grids.grid if self.grids is not None else None
        source, key_grid = x, grid
        if self.sr is not None:
            source = self.norm(self.sr(x.transpose(1, 2))).transpose(1, 2)
            key_grid = TokenGrid.line(source.shape[1])
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (self.q(x), self.k(source), self.v(source))
        )
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))
