"""NextViT's attention, with keys averaged over runs of neighbouring tokens in reading order.

Exact for softmax, any input size. The averaged keys no longer lie on a grid: mechanisms that look at one see a line.
`drop=("pooling",)` takes the averaging and its norm out, and every token is a key.
"""

from __future__ import annotations

from typing import Any

from timm.models.nextvit import EfficientAttention
from torch import Tensor

from linvit.attention import TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import SequenceHost


class NextViTHost(SequenceHost, EfficientAttention):
    original = EfficientAttention
    features = {"pooling": ("sr", "norm")}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid if module.sr is None else TokenGrid.line(args[0].shape[1] // module.N_ratio)

    def forward(self, x: Tensor) -> Tensor:
        source, key_grid = x, self.token_grid
        if self.sr is not None:
            source = self.norm(self.sr(x.transpose(1, 2))).transpose(1, 2)
            key_grid = TokenGrid.line(source.shape[1])
        q, k, v = (self.split_heads(t) for t in (self.q(x), self.k(source), self.v(source)))
        out = self.attend(q, k, v, self.token_grid, key_grid=key_grid, x=x)
        return self.proj_drop(self.project_out(out, q))
