"""CaiT's talking-head attention, and the class attention of CaiT and XCiT.

Talking heads mix the logits and the weights of all heads, which only softmax has: exact there, given up elsewhere with
`drop=("talking_heads",)`. In class attention one query, the class token, asks all tokens; that is linear in the tokens
with any mechanism. It is exact for softmax; a mechanism that needs as many keys as queries, or that knows places, of
which the class token has none, leaves it as it is, and the report says so.
"""

from __future__ import annotations

from typing import Any

from timm.models.cait import ClassAttn, TalkingHeadAttn
from torch import Tensor

from linvit.attention import TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import ONE_QUERY, Host, PlainHost


class TalkingHeadHost(PlainHost, TalkingHeadAttn):
    original = TalkingHeadAttn
    features = {"talking_heads": ("proj_l", "proj_w")}

    def forward(self, x: Tensor) -> Tensor:
        if self.proj_l is None:
            return super().forward(x)
        q, k, v = self.project(x)
        logits = (q @ k.transpose(-2, -1) * self.scale).movedim(1, -1)
        out = self.proj_w(self.proj_l(logits).softmax(-2)).movedim(-1, 1) @ v
        return self.proj_drop(self.project_out(out, q))


class ClassTokenHost(Host):
    """The class token, which comes first, asks all tokens."""

    needs = (ONE_QUERY,)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid.line(args[0].shape[1])

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.split_heads(self.k(x)), self.split_heads(self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        q, (k, v) = self.split_heads(self.q(first)), self._keys_and_values(x)
        out = self.attend(q, k, v, None, x=first)
        return self.proj_drop(self.project_out(out, q))


class ClassAttnHost(ClassTokenHost, ClassAttn):
    original = ClassAttn
