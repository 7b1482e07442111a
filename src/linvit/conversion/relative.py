"""Relative position tables on grids they were not learned on, so that a converted model takes any input size."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.layers.pos_embed_rel import RelPosBiasTf, RelPosMlp, gen_relative_log_coords, gen_relative_position_index
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


def resized_bias(rel_pos: Any, grid: TokenGrid) -> Tensor:
    """The bias `(1, heads, tokens, tokens)` of one of timm's relative position modules on another grid than its own.

    Tables are resized; an MLP of log-spaced offsets is asked at the new ones, on the scale it was trained with.
    """
    size = (grid.height, grid.width)
    if isinstance(rel_pos, RelPosMlp):
        learned = rel_pos.pretrained_window_size if rel_pos.pretrained_window_size[0] else rel_pos.window_size
        like = rel_pos.rel_coords_log
        offsets = gen_relative_log_coords(size, learned, rel_pos.mode, device=like.device, dtype=like.dtype)
        values = rel_pos.mlp(offsets).flatten(0, 1)
        bias = rel_pos.bias_act(values[gen_relative_position_index(size, device=like.device)].permute(2, 0, 1))
        bias = bias if rel_pos.bias_gain is None else rel_pos.bias_gain * bias
        return F.pad(bias, (grid.prefix, 0, grid.prefix, 0))[None]
    table = rel_pos.relative_position_bias_table
    if isinstance(rel_pos, RelPosBiasTf):  # its offsets run from query to key, the others from key to query
        table = table.flip(-2, -1).flatten(1).t()
    return table_bias(table, rel_pos.window_size, grid)


def any_image_size(model: nn.Module, kind: type[Host]) -> None:
    """Let a model whose only positions are relative take images of any size: its patch embedding insists on one."""
    for owner in model.modules():
        embed = stem(owner)
        relative = getattr(owner, "pos_embed", None) is None
        if relative and isinstance(embed, PatchEmbed) and any(isinstance(m, kind) for m in owner.modules()):
            embed.strict_img_size = False
