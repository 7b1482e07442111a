"""FastViT's attention over pictures, in its last stage. Exact for softmax, any input size. The stages that mix tokens
by convolution stay as they are."""

from __future__ import annotations

from timm.models.fastvit import Attention
from torch import Tensor

from linvit.conversion.host import PictureHost, grid_of, to_tokens


class FastViTHost(PictureHost, Attention):
    original = Attention

    def forward(self, x: Tensor) -> Tensor:
        tokens = to_tokens(x)
        q, k, v = self.project(tokens)
        out = self.project_out(self.attend(q, k, v, grid_of(x), x=tokens), q)
        return self.proj_drop(out).transpose(1, 2).reshape(x.shape)
