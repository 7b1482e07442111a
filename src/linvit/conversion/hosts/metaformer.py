"""The attention of MetaFormer models: CAFormer and others with attention stages. Exact for softmax, any input size.

Stages that mix tokens by pooling or convolution have no attention and stay as they are.
"""

from __future__ import annotations

from typing import Any

from timm.models.metaformer import Attention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Grids, Host
from linvit.conversion.pictures import follow_pictures


class MetaFormerHost(Host, Attention):
    original = Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.qkv.in_features)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_pictures(model, cls)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, self.grids.grid if self.grids is not None else None, x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))
