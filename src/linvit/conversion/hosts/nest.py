"""NesT's attention inside blocks of the picture. Exact for softmax.

The model's position tables fix the input size, as in the original. Its output has the channels of all heads
interleaved, which the host keeps.
"""

from __future__ import annotations

from typing import Any

from timm.models.nest import Attention
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.conversion.host import Grids, Host
from linvit.conversion.pictures import follow_pictures


class NestHost(Host, Attention):
    original = Attention

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_pictures(model, cls)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.flatten(0, 1)
        q, k, v = self.qkv(blocks).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, self.grids.grid if self.grids is not None else None, x=blocks)
        out = self.proj(out.permute(0, 2, 3, 1).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q)).unflatten(0, x.shape[:2])
