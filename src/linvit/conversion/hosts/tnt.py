"""TNT's attention, inside each patch and among the patches. Exact for softmax, at the one image size that TNT was
built for.
"""

from __future__ import annotations

from typing import Any

from timm.models.tnt import TNT, Attention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import Host, unpack


class TNTHost(Host, Attention):
    original = Attention
    token_grid: TokenGrid | None = None

    @classmethod
    def shape(cls, module: Any) -> Shape:
        width = module.v.in_features
        return Shape(module.num_heads, module.head_dim, width // module.num_heads, dim=width)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        inside = any(block.attn_in.qk is module.qk for block in image.owner.blocks)
        return TokenGrid(*image.owner.pixel_embed.new_patch_size) if inside else image.grid

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for owner in model.modules():
            if isinstance(owner, TNT):
                block: Any
                for block in owner.blocks:
                    block.attn_in.token_grid = TokenGrid(*owner.pixel_embed.new_patch_size)
                    block.attn_out.token_grid = TokenGrid(*owner.pixel_embed.grid_size, prefix=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = unpack(self.qk(x), 2, self.num_heads)
        out = self.attend(q, k, self.split_heads(self.v(x)), self.token_grid, x=x)
        return self.proj_drop(self.project_out(out, q))
