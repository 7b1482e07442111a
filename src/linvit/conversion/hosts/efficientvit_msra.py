"""EfficientViT (MSRA): cascaded group attention, where each head reads what the head before it put out.

Heads run one after the other, each through the same mechanism: it has one head, and what parameters it brings are
shared by all. Exact for softmax. The bias for each offset is exact in mechanisms with logits and given up with
`drop=("relative_bias",)` elsewhere. The original takes one input size; a converted model takes any, with the same
windows and the bias table resized where the last stage sees another grid than the one it was learned on.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.efficientvit_msra import CascadedGroupAttention, LocalWindowAttention
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Shape
from linvit.conversion.host import WIDE_VALUES, OffsetBiasHost, PictureHost, grid_of, to_tokens


class CascadedHost(OffsetBiasHost, PictureHost, CascadedGroupAttention):
    original = CascadedGroupAttention
    needs = (WIDE_VALUES,)

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(1, module.key_dim, module.val_dim, dim=module.qkvs[0].conv.in_channels)

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for owner in model.modules():
            if type(owner) is LocalWindowAttention and isinstance(owner.attn, cls):
                owner.__class__ = AnySizeWindows

    def forward(self, x: Tensor) -> Tensor:
        grid = grid_of(x)
        bias = self.bias(grid)
        outs: list[Tensor] = []
        for head, (part, qkv, near) in enumerate(zip(x.chunk(len(self.qkvs), dim=1), self.qkvs, self.dws, strict=True)):
            feature = part + outs[-1] if outs else part
            query, key, value = qkv(feature).split([self.key_dim, self.key_dim, self.val_dim], dim=1)
            q, k, v = (grid.from_map(t, 1) for t in (near(query), key, value))
            own = None if bias is None else bias[:, head : head + 1]
            outs.append(grid.to_map(self.attend(q, k, v, grid, bias=own, x=to_tokens(feature))))
        return self.proj(torch.cat(outs, dim=1))


class AnySizeWindows(LocalWindowAttention):
    """The windows around the attention, on a picture of any size; zero padding counts as tokens, as in the original."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        side = self.window_resolution
        if height <= side and width <= side:
            return self.attn(x)
        x = F.pad(x, (0, -width % side, 0, -height % side))
        rows, columns = x.shape[2] // side, x.shape[3] // side
        windows = x.reshape(batch, channels, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
        windows = self.attn(windows.reshape(-1, channels, side, side))
        x = windows.reshape(batch, rows, columns, channels, side, side).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(batch, channels, rows * side, columns * side)[:, :, :height, :width]
