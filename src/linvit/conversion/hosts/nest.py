"""NesT's attention inside blocks of the picture. Exact for softmax.

The model's position tables fix the input size, as in the original. Its output has the channels of all heads
interleaved, which the host keeps.
"""

from __future__ import annotations

from timm.models.nest import Attention
from torch import Tensor

from linvit.conversion.host import SequenceHost


class NestHost(SequenceHost, Attention):
    original = Attention

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.flatten(0, 1)
        q, k, v = self.project(blocks)
        out = self.attend(q, k, v, self.token_grid, x=blocks)
        out = self.mechanism.after_projection(self.proj(out.permute(0, 2, 3, 1).flatten(2)), q)
        return self.proj_drop(out).unflatten(0, x.shape[:2])
