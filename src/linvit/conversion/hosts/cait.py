"""CaiT's talking-head attention, and the class attention of CaiT and XCiT.

Talking heads mix the logits and the weights of all heads, which only softmax has: exact there, given up elsewhere with
`drop=("talking_heads",)`. In class attention one query, the class token, asks all tokens; that is linear in the tokens
with any mechanism. It is exact for softmax; a mechanism that needs as many keys as queries, or that knows places, of
which the class token has none, leaves it as it is, and the report says so.
"""

from __future__ import annotations

from typing import Any

from timm.models.cait import ClassAttn, TalkingHeadAttn
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, follow_grids, one_query_ask, talking_ask


class TalkingHeadHost(Host, TalkingHeadAttn):
    original = TalkingHeadAttn

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return ([talking_ask()] if module.proj_l is not None else []) + dropout_ask(module)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "talking_heads":
            module.proj_l = module.proj_w = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_grids(model, cls)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.proj_l is None:
            out = self.attend(q, k, v, self.grids.grid if self.grids is not None else None, x=x)
        else:
            logits = (q @ k.transpose(-2, -1) * self.scale).movedim(1, -1)
            out = self.proj_w(self.proj_l(logits).softmax(-2)).movedim(-1, 1) @ v
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))


class ClassAttnHost(Host, ClassAttn):
    original = ClassAttn

    @staticmethod
    def shape(module: Any) -> Shape:
        width = module.q.in_features
        return Shape(module.num_heads, width // module.num_heads, dim=width)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [one_query_ask(), *dropout_ask(module)]

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid.line(args[0].shape[1])

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (self.q(first), self.k(x), self.v(x)))
        out = self.attend(q, k, v, None, x=first)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))
