"""timm's shared `Attention`: ViT, DeiT, PiT, NaFlexViT, CSATv2, MobileViT, CrossViT and every model built from it.

Exact for softmax. Padding masks are honoured by every mechanism with a key mask; any other mask is a bias on the
logits, which only mechanisms with logits take. NaFlexViT's padded batches have no one grid, so mechanisms that look at
it need images there.
"""

from __future__ import annotations

import torch
from timm.layers import Attention
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from linvit.attention import Mechanism
from linvit.conversion.host import Host, SequenceHost, merge_heads, refuse_causal


class MaskedHost(SequenceHost):
    """A host of a sequence that may come with a mask."""

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        use_key_masks(model)

    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, x: Tensor) -> Tensor:
        mask, bias = split_mask(attn_mask, self.mechanism)
        return self.attend(q, k, v, self.token_grid, mask=mask, bias=bias, x=x)


class ViTHost(MaskedHost, Attention):
    original = Attention

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_causal(is_causal)
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        out = self.norm(merge_heads(self.attend_masked(q, k, v, attn_mask, x)))
        if gate is not None:
            out = out * gate
        return self.proj_drop(self.mechanism.after_projection(self.proj(out), q))


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


def use_key_masks(model: nn.Module) -> None:
    """NaFlexViT masks padding for every pair of tokens or once per key, with the same result for real tokens. Only the
    second is linear, and mechanisms without logits can honour no other."""
    for owner in model.modules():
        if isinstance(owner, NaFlexVit):
            inside = [m for m in owner.modules() if isinstance(m, Host)]
            if not all(host.mechanism.capabilities.bias for host in inside):
                owner.use_key_only_attn_mask = True
