"""VOLO's self-attention over pictures and its class attention.

Exact for softmax. Class attention is linear already: mechanisms that cannot serve a single query without a place (see
CaiT) leave it as it is. The outlookers of the first stage have no keys, they predict the weights of 3×3 neighbours from
the centre alone, and stay.
"""

from __future__ import annotations

from timm.models.volo import Attention, ClassAttention
from torch import Tensor

from linvit.attention import TokenGrid
from linvit.conversion.host import ChannelsLastHost, unpack
from linvit.conversion.hosts.cait import ClassTokenHost


class VOLOHost(ChannelsLastHost, Attention):
    original = Attention

    def forward(self, x: Tensor) -> Tensor:
        grid, x = TokenGrid(x.shape[1], x.shape[2]), x.flatten(1, 2)
        q, k, v = self.project(x)
        out = self.proj_drop(self.project_out(self.attend(q, k, v, grid, x=x), q))
        return out.unflatten(1, (grid.height, grid.width))


class VOLOClassHost(ClassTokenHost, ClassAttention):
    original = ClassAttention

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, ...]:
        return unpack(self.kv(x), 2, self.num_heads)
