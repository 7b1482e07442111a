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
from torch import Tensor

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, bias_ask, dropout_ask, rotary_ask


class SAMHost(Host, Attention):
    original = Attention
    rope: Any

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.qkv.in_features)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        asks = [bias_ask("relative_bias")] if module.use_rel_pos else []
        return asks + ([rotary_ask()] if module.rope is not None else []) + dropout_ask(module)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.use_rel_pos = False
            module.rel_pos_h = module.rel_pos_w = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*args[0].shape[1:3])

    def _rotation(self, grid: TokenGrid, like: Tensor) -> Tensor:
        size = [grid.height, grid.width]
        if list(self.rope.feat_shape) == size:
            return self.rope.get_embed()
        return self.rope._get_pos_embed_values(size, device=like.device, dtype=like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        grid = TokenGrid(height, width)
        x = x.flatten(1, 2)
        q, k, v = self.qkv(x).reshape(batch, grid.tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None
        if self.use_rel_pos and self.mechanism.capabilities.bias:
            size = (height, width)
            bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.unflatten(0, (batch, self.num_heads))
        if self.rope is not None:
            rotation = self._rotation(grid, q)
            q, k = apply_rot_embed_cat(q, rotation).type_as(v), apply_rot_embed_cat(k, rotation).type_as(v)
        out = self.attend(q, k, v, grid, bias=bias, x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q)).unflatten(1, (height, width))
