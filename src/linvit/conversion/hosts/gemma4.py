"""Gemma 4's vision encoder: rotary position in two axes, q, k and v normalised, and logits without the 1/√d.

Exact for softmax: q is scaled with √d for every mechanism alike, which makes up for the 1/√d of the mechanism. Rotary
position stays relative in mechanisms that know q and k by their products and norms; with `drop=("rotary",)` the others
still see q and k rotated. Padded batches bring a key mask.
"""

from __future__ import annotations

from typing import Any

from timm.models.gemma4_vit import Gemma4Attention, apply_multidimensional_rope
from torch import Tensor, nn

from linvit.attention import Shape
from linvit.conversion.host import ANOTHER_WIDTH, Ask, changes_width, merge_heads
from linvit.conversion.hosts.vit import MaskedHost


class Gemma4Host(MaskedHost, Gemma4Attention):
    original = Gemma4Attention
    features = {"rotary": ()}

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.q_proj.linear.in_features)

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([ANOTHER_WIDTH] if changes_width(module.o_proj.linear) else [])

    def forward(self, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        q = apply_multidimensional_rope(q, rope_cos, rope_sin) * self.head_dim**0.5
        k = apply_multidimensional_rope(k, rope_cos, rope_sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.num_kv_groups > 1:
            k, v = k.repeat_interleave(self.num_kv_groups, dim=1), v.repeat_interleave(self.num_kv_groups, dim=1)
        out = self.o_proj(merge_heads(self.attend_masked(q, k, v, attn_mask, x)))
        return self.proj_drop(self.mechanism.after_projection(out, q))
