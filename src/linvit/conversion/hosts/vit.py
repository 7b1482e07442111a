"""timm's shared `Attention`: ViT, DeiT and every model built from the same block. Exact for softmax."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, refuse_mask


class ViTHost(Host, Attention):
    original = Attention

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.qkv.in_features)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return dropout_ask(module)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        for owner in model.modules():
            embed = getattr(owner, "patch_embed", None)
            if not isinstance(embed, nn.Module):
                continue
            inside = [m for m in owner.modules() if isinstance(m, cls)]
            if not inside or any(m.grids is not None for m in inside):
                continue
            grids = Grids(getattr(owner, "num_prefix_tokens", 0))
            embed.register_forward_pre_hook(grids.before_patches)
            for module in inside:
                module.grids = grids

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        refuse_mask(is_causal)
        batch, tokens, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        mask, bias = split_mask(attn_mask)
        grid = self.grids.grid if self.grids is not None else None
        out = self.attend(q, k, v, grid, mask=mask, bias=bias, x=x)
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, -1))
        if gate is not None:
            out = out * gate
        return self.proj_drop(self.mechanism.after_projection(self.proj(out), q))


def split_mask(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """timm's attn_mask as a key mask `(batch, keys)` where it is one, else as a bias on the logits."""
    if attn_mask is None:
        return None, None
    if attn_mask.dtype == torch.bool and attn_mask.ndim == 4 and attn_mask.shape[1] == attn_mask.shape[2] == 1:
        return attn_mask[:, 0, 0], None
    if attn_mask.dtype == torch.bool:
        return None, torch.zeros(attn_mask.shape, device=attn_mask.device).masked_fill(~attn_mask, float("-inf"))
    return None, attn_mask
