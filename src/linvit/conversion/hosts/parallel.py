"""ViT-22B's parallel block and differential attention, alone and in a parallel block.

In `ParallelScalingBlock` one projection makes q, k, v and the MLP's input, so the block itself is the host. Exact for
softmax. Differential attention subtracts a second attention map from the first:

    out = norm(attend(q₁, k₁, v) − λ · attend(q₂, k₂, v)) · (1 − λ₀)

It is exact for softmax, and with another mechanism the difference of two of its maps. Values are twice as wide as keys.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from torch import Tensor

from linvit.attention import Shape
from linvit.conversion.host import WIDE_VALUES, merge_heads, refuse_causal
from linvit.conversion.hosts.vit import MaskedHost


class _DifferentialHost(MaskedHost):
    """Two maps per head: q and k in twice as many heads, each value shared by two."""

    needs = (WIDE_VALUES,)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (t.unflatten(-1, (2 * self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k))
        v = v.unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2).repeat_interleave(2, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        first, second = self.attend_masked(q, k, v, attn_mask, x).unflatten(1, (self.num_heads, 2)).unbind(2)
        out = self.sub_norm(first - self._compute_lambda().type_as(q) * second) * (1 - self.lambda_init)
        return merge_heads(out), q


class DiffHost(_DifferentialHost, DiffAttention):
    original = DiffAttention

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(2 * module.num_heads, module.head_dim, 2 * module.head_dim, module.qkv.in_features)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_causal(is_causal)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out, q = self._mix(q, k, v, attn_mask, x)
        return self.proj_drop(self.mechanism.after_projection(self.proj(self.norm(out)), q))


class _ParallelBase(MaskedHost):
    """One projection makes q, k, v and the MLP's input."""

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.in_proj.in_features)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        return merge_heads(self.attend_masked(q, k, v, attn_mask, x)), q

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_causal(is_causal)
        normed = self.in_norm(x)
        hidden, q, k, v = self.in_proj(normed).split(self.in_split, dim=-1)
        out, q = self._mix(q, k, v, attn_mask, normed)
        hidden = self.mlp_drop(self.mlp_act(hidden if self.mlp_bias is None else hidden + self.mlp_bias))
        if self.out_proj is not None:
            out = self.out_proj(torch.cat((out, hidden), dim=-1))
        else:
            out = self.attn_out_proj(out) + self.mlp_out_proj(hidden)
        return x + self.drop_path(self.ls(self.mechanism.after_projection(out, q)))


class ParallelHost(_ParallelBase, ParallelScalingBlock):
    original = ParallelScalingBlock


class DiffParallelHost(_DifferentialHost, _ParallelBase, DiffParallelScalingBlock):
    original = DiffParallelScalingBlock

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(2 * module.num_heads, module.head_dim, 2 * module.head_dim, module.in_proj.in_features)
