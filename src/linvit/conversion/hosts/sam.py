"""SAM's image encoder: attention over windows or the whole picture, with a decomposed relative position or rotary.

Exact for softmax. The relative position depends on the query; it is exact in mechanisms with logits and given up with
`drop=("relative_bias",)` elsewhere. Rotary position stays relative in mechanisms that know q and k by their products
and norms; `drop=("rotary",)` lets the others have q and k rotated all the same. Any input size, as in the original,
and with rotary position too. Windows at the border are padded with zero tokens, which are keys like any other: the
original attends to them as well.
"""

from __future__ import annotations

from typing import Any

from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import Attention, get_decomposed_rel_pos_bias
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.conversion.host import FEATURES, Ask, ChannelsLastHost, has_logits


class SAMHost(ChannelsLastHost, Attention):
    original = Attention
    rope: Any
    features = {"relative_bias": ("rel_pos_h", "rel_pos_w")}

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([FEATURES["rotary"]] if module.rope is not None else [])

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        if feature == "relative_bias":
            module.use_rel_pos = False

    def _rotation(self, grid: TokenGrid, like: Tensor) -> Tensor:
        size = [grid.height, grid.width]
        if list(self.rope.feat_shape) == size:
            return self.rope.get_embed()
        return self.rope._get_pos_embed_values(size, device=like.device, dtype=like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[1], x.shape[2])
        grid, x = TokenGrid(*size), x.flatten(1, 2)
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None
        if self.use_rel_pos and has_logits(self.mechanism):
            bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.unflatten(0, (len(x), self.num_heads))
        if self.rope is not None:
            rotation = self._rotation(grid, q)
            q, k = apply_rot_embed_cat(q, rotation).type_as(v), apply_rot_embed_cat(k, rotation).type_as(v)
        out = self.attend(q, k, v, grid, bias=bias, x=x)
        return self.proj_drop(self.project_out(out, q)).unflatten(1, size)
