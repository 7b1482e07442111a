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
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, follow_grids, refuse_mask, wide_ask
from linvit.conversion.hosts.vit import split_mask


class _SequenceHost(Host):
    num_heads: Any
    head_dim: Any
    q_norm: Any
    k_norm: Any

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_grids(model, cls)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, x: Tensor) -> Tensor:
        mask, bias = split_mask(attn_mask, self.mechanism)
        return self.attend(q, k, v, self.grids.grid if self.grids is not None else None, mask=mask, bias=bias, x=x)


class _DifferentialHost(_SequenceHost):
    """Two maps per head: q and k in twice as many heads, each value shared by two."""

    sub_norm: Any
    lambda_init: Any
    _compute_lambda: Any

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [wide_ask(), *dropout_ask(module)]

    def _difference(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = (t.unflatten(-1, (2 * self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k))
        v = v.unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2).repeat_interleave(2, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        first, second = self._attend(q, k, v, attn_mask, x).unflatten(1, (self.num_heads, 2)).unbind(2)
        out = self.sub_norm(first - self._compute_lambda().type_as(q) * second) * (1 - self.lambda_init)
        return out.transpose(1, 2).flatten(2), q


class DiffHost(_DifferentialHost, DiffAttention):
    original = DiffAttention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(2 * module.num_heads, module.head_dim, 2 * module.head_dim, module.qkv.in_features)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_mask(is_causal)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out, q = self._difference(q, k, v, attn_mask, x)
        return self.proj_drop(self.mechanism.after_projection(self.proj(self.norm(out)), q))


class ParallelHost(_SequenceHost, ParallelScalingBlock):
    original = ParallelScalingBlock

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.in_proj.in_features)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_mask(is_causal)
        normed = self.in_norm(x)
        hidden, q, k, v = self.in_proj(normed).split(self.in_split, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        out = self._attend(q, k, v, attn_mask, normed).transpose(1, 2).flatten(2)
        hidden = self.mlp_drop(self.mlp_act(hidden if self.mlp_bias is None else hidden + self.mlp_bias))
        if self.out_proj is not None:
            out = self.out_proj(torch.cat((out, hidden), dim=-1))
        else:
            out = self.attn_out_proj(out) + self.mlp_out_proj(hidden)
        return x + self.drop_path(self.ls(self.mechanism.after_projection(out, q)))


class DiffParallelHost(_DifferentialHost, DiffParallelScalingBlock):
    original = DiffParallelScalingBlock

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(2 * module.num_heads, module.head_dim, 2 * module.head_dim, module.in_proj.in_features)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_mask(is_causal)
        normed = self.in_norm(x)
        hidden, q, k, v = self.in_proj(normed).split(self.in_split, dim=-1)
        out, q = self._difference(q, k, v, attn_mask, normed)
        hidden = self.mlp_drop(self.mlp_act(hidden if self.mlp_bias is None else hidden + self.mlp_bias))
        out = self.out_proj(torch.cat((out, hidden), dim=-1))
        return x + self.drop_path(self.ls(self.mechanism.after_projection(out, q)))
