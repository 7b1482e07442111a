"""CoaT's factorised attention with convolutional relative position. Native is `efficient` in its variant `factorised`.

    out = q / √d · (softmax_N(k)ᵀ · v) + q ∘ conv(v)

Exact for that. The second term looks at neighbours only and stays with every mechanism. The original takes one input
size because its patch embeddings insist on it; a converted model follows the image.
"""

from __future__ import annotations

from typing import Any

from timm.layers import PatchEmbed
from timm.models.coat import CoaT, FactorAttnConvRelPosEnc
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import Host


class CoaTHost(Host, FactorAttnConvRelPosEnc):
    original = FactorAttnConvRelPosEnc
    native = "efficient"
    crpe: Any

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"variant": "factorised"} if mechanism == "efficient" else {}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(args[1][0], args[1][1], prefix=1)

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        embeds = (m for owner in model.modules() if isinstance(owner, CoaT) for m in owner.modules())
        for embed in embeds:
            if isinstance(embed, PatchEmbed) and embed.strict_img_size:
                embed.strict_img_size = False
                embed.register_forward_pre_hook(follow_size)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.project(x)
        out = self.attend(q, k, v, TokenGrid(size[0], size[1], prefix=1), x=x) + self.crpe(q, v, size=size)
        return self.proj_drop(self.project_out(out, q))


def follow_size(embed: Any, args: tuple[Any, ...]) -> None:
    """Forward pre-hook: CoaT asks its patch embeddings for the size of the picture."""
    embed.grid_size = embed.dynamic_feat_size((args[0].shape[-2], args[0].shape[-1]))
