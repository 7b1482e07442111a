"""CrossViT's cross-attention: the class token of one branch asks the patches of the other.

One query is linear in the tokens with any mechanism. Exact for softmax; a mechanism that needs as many keys as queries
leaves it as it is. The self-attention of the branches is timm's shared one. Any input size, as the model rescales the
image itself.
"""

from __future__ import annotations

from timm.models.crossvit import CrossAttention
from torch import Tensor

from linvit.attention import TokenGrid
from linvit.conversion.host import ONE_QUERY, SequenceHost


class CrossViTHost(SequenceHost, CrossAttention):
    original = CrossAttention
    needs = (ONE_QUERY,)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        q, k, v = (self.split_heads(t) for t in (self.wq(first), self.wk(x), self.wv(x)))
        out = self.attend(q, k, v, TokenGrid(1, 1), key_grid=self.token_grid, x=first)
        return self.proj_drop(self.project_out(out, q))
