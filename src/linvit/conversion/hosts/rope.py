"""`AttentionRope` and `EvaAttention`: EVA-02, DINOv3, Perception Encoder, RoPE-ViT, DeepSeek's and Qwen3's encoders,
NaFlexViT's rotary variants. Grouped key and value heads are repeated for their queries, as the original does.

Exact for softmax. Rotary position stays purely relative in mechanisms that know q and k by their products and norms.
A feature map per channel breaks that: with `drop=("rotary",)` q and k are still rotated before it, so positions still
inform the features, but a shift of both no longer cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from linvit.conversion.host import FEATURES, Ask, biased_projection, given, merge_heads, refuse_causal
from linvit.conversion.hosts.vit import MaskedHost


class _RopeBase(MaskedHost):
    """What the two share: everything but the projections."""

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([FEATURES["rotary"]] if given(model, module, "rope") else [])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv is None:
            return self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self._heads(q), self._heads(k), self._heads(v)

    def _rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        prefix, patches = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        return torch.cat((prefix, apply_rot_embed_cat(patches, rope, half=self.rotate_half)), dim=2)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        refuse_causal(is_causal)
        q, k, v = self._project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self._rotate(q, rope).type_as(v), self._rotate(k, rope).type_as(v)
        groups = self.num_heads // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = self.norm(merge_heads(self.attend_masked(q, k, v, attn_mask, x)))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.mechanism.after_projection(self.proj(out), q))


class RopeHost(_RopeBase, AttentionRope):
    original = AttentionRope


class EvaHost(_RopeBase, EvaAttention):
    original = EvaAttention

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.q_bias is None:
            return super()._project(x)
        q, k, v = biased_projection(self, x).chunk(3, dim=-1)
        return self._heads(q), self._heads(k), self._heads(v)
