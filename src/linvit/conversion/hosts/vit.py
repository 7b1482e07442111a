"""Sequences that may come with a mask: timm's shared attention, with rotary position, differential, in parallel blocks.

Padding masks are honoured by every mechanism with a key mask; any other mask is a bias on the logits, which only
mechanisms with logits take.
"""

from dataclasses import replace
from typing import Any

import torch
from timm.layers import Attention, AttentionRope, DiffAttention
from timm.models.eva import EvaAttention
from timm.models.gemma4_vit import Gemma4Attention
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from torch import Tensor, nn

from linvit.attention import Mechanism, Rotary, Shape
from linvit.conversion.host import (
    ANOTHER_WIDTH,
    FEATURES,
    Ask,
    Host,
    SequenceHost,
    changes_width,
    given,
    merge_heads,
    refuse_causal,
)


class MaskedHost(SequenceHost):
    """A host of a sequence that may come with a mask."""

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        use_key_masks(model)

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, x: Tensor, rotary: Rotary | None = None
    ) -> Tensor:
        """The mechanism's answer; grouped key and value heads are repeated for their queries, as the originals do."""
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mask, bias = split_mask(attn_mask, self.mechanism)
        return self.attend(q, k, v, self.token_grid, mask=mask, bias=bias, x=x, rotary=rotary)


def split_mask(attn_mask: Tensor | None, mechanism: Mechanism) -> tuple[Tensor | None, Tensor | None]:
    """timm's attn_mask as a key mask `(batch, keys)` where it is one, else as a bias on the logits.

    NaFlexViT pads with one row of zeros and lowest numbers per image. That is a bias where there are logits; other
    mechanisms take it for the key mask it is.
    """
    if attn_mask is None:
        return None, None
    one_row = attn_mask.ndim == 4 and attn_mask.shape[1] == attn_mask.shape[2] == 1
    if attn_mask.dtype == torch.bool:
        if one_row:
            return attn_mask[:, 0, 0], None
        return None, torch.zeros(attn_mask.shape, device=attn_mask.device).masked_fill(~attn_mask, float("-inf"))
    if one_row and not mechanism.capabilities.bias:
        return attn_mask[:, 0, 0] > torch.finfo(attn_mask.dtype).min / 2, None
    return None, attn_mask


def rotation(table: Tensor, *, half: bool) -> Rotary:
    """timm's rotary position: sines before cosines, halves of a head paired or neighbouring channels. It has no angles
    for class token and registers, which come first."""
    sin, cos = table.chunk(2, dim=-1)
    return Rotary(cos, sin, blocks=1 if half else cos.shape[-1] // 2)


def use_key_masks(model: nn.Module) -> None:
    """NaFlexViT masks padding for every pair of tokens or once per key, with the same result for real tokens. Only the
    second is linear, and mechanisms without logits can honour no other."""
    for owner in model.modules():
        if isinstance(owner, NaFlexVit):
            inside = [m for m in owner.modules() if isinstance(m, Host)]
            if not all(host.mechanism.capabilities.bias for host in inside):
                owner.use_key_only_attn_mask = True


class ViTHost(MaskedHost, Attention):
    """timm's shared `Attention`: ViT, DeiT, PiT, NaFlexViT, CSATv2, MobileViT, CrossViT and every model built from it.

    Exact for softmax. Padding masks are honoured by every mechanism with a key mask; any other mask is a bias on the
    logits, which only mechanisms with logits take. NaFlexViT's padded batches have no one grid, so mechanisms that look
    at it need images there.
    """

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_causal(is_causal)
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        out = self.norm(merge_heads(self.attend_masked(q, k, v, attn_mask, x)))
        return self.finish(self.proj(out if gate is None else out * gate), q)


class _RopeBase(MaskedHost):
    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([FEATURES["rotary"]] if given(model, module, "rope") else [])

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        else:
            parts = list(self.packed(x).chunk(3, dim=-1))
        return tuple(part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        refuse_causal(is_causal)
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        rotary = None if rope is None else rotation(rope, half=self.rotate_half)
        out = self.norm(merge_heads(self.attend_masked(q.type_as(v), k.type_as(v), v, attn_mask, x, rotary)))
        return self.finish(self.proj(out if self.gate is None else out * self.gate(x).sigmoid()), q)


class RopeHost(_RopeBase, AttentionRope):
    """`AttentionRope` and `EvaAttention`: EVA-02, DINOv3, Perception Encoder, RoPE-ViT, DeepSeek's and Qwen3's
    encoders, NaFlexViT's rotary variants. Grouped key and value heads are repeated for their queries, as the original
    does.

    Exact for softmax. Rotary position stays purely relative in mechanisms that know q and k by their products and
    norms, which get them rotated, and in those with features per channel, which are rotated themselves. In the others,
    and with `rotary="before"`, it takes `drop=("rotary",)`: q and k are rotated before the feature map, so positions
    still inform it, but a shift of both no longer cancels.
    """


class EvaHost(_RopeBase, EvaAttention):
    pass


class Gemma4Host(MaskedHost, Gemma4Attention):
    """Gemma 4's vision encoder: rotary position in two axes, q, k and v normalised, and logits without the 1/√d.

    Exact for softmax: q is scaled with √d for every mechanism alike, which makes up for the 1/√d of the mechanism.
    Rotary position is honoured as in EVA-02. Padded batches bring a key mask.
    """

    features = {"rotary": ()}

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([ANOTHER_WIDTH] if changes_width(module.o_proj.linear) else [])

    def forward(self, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        q, k, v = (q * self.head_dim**0.5).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        rotary = Rotary(rope_cos.unsqueeze(1), rope_sin.unsqueeze(1), blocks=2)
        return self.finish(self.o_proj(merge_heads(self.attend_masked(q, k, v, attn_mask, x, rotary))), q)


class _DifferentialHost(MaskedHost):
    """Two maps per head: q and k in twice as many heads, each value shared by two."""

    @classmethod
    def shape(cls, module: Any) -> Shape:
        plain = super().shape(module)
        return replace(plain, heads=2 * module.num_heads, value_dim=2 * module.head_dim)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (t.unflatten(-1, (2 * self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k))
        v = v.unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2).repeat_interleave(2, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        first, second = self.attend_masked(q, k, v, attn_mask, x).unflatten(1, (self.num_heads, 2)).unbind(2)
        out = self.sub_norm(first - self._compute_lambda().type_as(q) * second) * (1 - self.lambda_init)
        return merge_heads(out), q


class DiffHost(_DifferentialHost, DiffAttention):
    """ViT-22B's parallel block and differential attention, alone and in a parallel block.

    In `ParallelScalingBlock` one projection makes q, k, v and the MLP's input, so the block itself is the host. Exact
    for softmax. Differential attention subtracts a second attention map from the first:

        out = norm(attend(q₁, k₁, v) − λ · attend(q₂, k₂, v)) · (1 − λ₀)

    It is exact for softmax, and with another mechanism the difference of two of its maps. Values are twice as wide as
    keys.
    """

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_causal(is_causal)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out, q = self._mix(q, k, v, attn_mask, x)
        return self.finish(self.proj(self.norm(out)), q)


class _ParallelBase(MaskedHost):
    """One projection makes q, k, v and the MLP's input."""

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
    pass


class DiffParallelHost(_DifferentialHost, _ParallelBase, DiffParallelScalingBlock):
    pass
