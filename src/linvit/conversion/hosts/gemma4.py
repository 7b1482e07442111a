"""Gemma 4's vision encoder: rotary position in two axes, q, k and v normalised, and logits without the 1/√d.

Exact for softmax: q is scaled with √d for every mechanism alike, which makes up for the 1/√d of the mechanism. Rotary
position stays relative in mechanisms that know q and k by their products and norms; with `drop=("rotary",)` the others
still see q and k rotated. Padded batches bring a key mask.
"""

from __future__ import annotations

from typing import Any

from timm.models.gemma4_vit import Gemma4Attention, apply_multidimensional_rope
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, follow_grids, rotary_ask, width_ask
from linvit.conversion.hosts.vit import split_mask


class Gemma4Host(Host, Gemma4Attention):
    original = Gemma4Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.q_proj.linear.in_features)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [rotary_ask(), *dropout_ask(module), *width_ask(module.o_proj.linear)]

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_grids(model, cls)

    def forward(self, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        q = apply_multidimensional_rope(q, rope_cos, rope_sin) * self.head_dim**0.5
        k = apply_multidimensional_rope(k, rope_cos, rope_sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.num_kv_groups > 1:
            k, v = k.repeat_interleave(self.num_kv_groups, dim=1), v.repeat_interleave(self.num_kv_groups, dim=1)
        mask, bias = split_mask(attn_mask, self.mechanism)
        grid = self.grids.grid if self.grids is not None else None
        out = self.attend(q, k, v, grid, mask=mask, bias=bias, x=x)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))
