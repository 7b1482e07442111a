"""Relative position tables on grids they were not learned on, so that a converted model takes any input size."""

from __future__ import annotations

import torch
from timm.layers import PatchEmbed
from timm.layers.pos_embed_rel import gen_relative_position_index
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import TokenGrid
from linvit.conversion.host import Host, stem


def table_bias(table: Tensor, window: tuple[int, int], grid: TokenGrid) -> Tensor:
    """The bias `(1, heads, tokens, tokens)` of a table `(offsets, heads)` learned on `window`, one row per offset.

    On another grid the rows are resized bicubically as the picture they are. The last three rows of a model with a
    class token stand for class to patch, patch to class and class to class; they have no size.
    """
    size, learned = (grid.height, grid.width), (2 * window[0] - 1, 2 * window[1] - 1)
    if size != tuple(window):
        picture = table[: learned[0] * learned[1]].t().unflatten(-1, learned)
        picture = F.interpolate(picture[None], (2 * size[0] - 1, 2 * size[1] - 1), mode="bicubic")[0]
        table = torch.cat((picture.flatten(-2).t(), table[learned[0] * learned[1] :]))
    index = gen_relative_position_index(size, class_token=grid.prefix > 0, device=table.device)
    return table[index].permute(2, 0, 1)[None]


def any_image_size(model: nn.Module, kind: type[Host]) -> None:
    """Let a model whose only positions are relative take images of any size: its patch embedding insists on one."""
    for owner in model.modules():
        embed = stem(owner)
        relative = getattr(owner, "pos_embed", None) is None
        if relative and isinstance(embed, PatchEmbed) and any(isinstance(m, kind) for m in owner.modules()):
            embed.strict_img_size = False
