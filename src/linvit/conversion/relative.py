"""Relative positions on grids they were not learned on, and hosts whose model may hold one table for all layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed, RelPosBias, RelPosMlp
from timm.layers.pos_embed_rel import RelPosBiasTf, gen_relative_log_coords, gen_relative_position_index
from timm.models.beit import RelativePositionBias
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import TokenGrid
from linvit.conversion.grids import Grids, stem
from linvit.conversion.host import FEATURES, Ask, SequenceHost, given


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


def on_grid(module: Any, grid: TokenGrid | None) -> bool:
    """Whether this is the grid that a module's positions were learned on; where it is not known they are taken so."""
    return grid is None or (grid.height, grid.width) == tuple(module.window_size)


class _FollowsGrid:
    """A table or an MLP of relative positions, for the grid of the image now passing through."""

    grids: Grids | None = None

    @property
    def now(self) -> TokenGrid | None:
        return self.grids.grid if self.grids is not None else None

    def get_bias(self) -> Tensor:
        return super().get_bias() if on_grid(self, self.now) else resized_bias(self, self.now)  # type: ignore


class GridRelPosBias(_FollowsGrid, RelPosBias):
    pass


class GridRelPosMlp(_FollowsGrid, RelPosMlp):
    pass


class GridBeitBias(_FollowsGrid, RelativePositionBias):
    def forward(self) -> Tensor:
        return super().forward() if on_grid(self, self.now) else resized_bias(self, self.now)  # type: ignore[arg-type]


FOLLOWERS: dict[type[nn.Module], type[Any]] = {
    RelPosBias: GridRelPosBias,
    RelPosMlp: GridRelPosMlp,
    RelativePositionBias: GridBeitBias,
}


class SharedBiasHost(SequenceHost):
    """Relative positions of the layer's own, or one module of the model that hands its bias to all layers.

    The shared one goes once no layer uses it. A model whose only positions are these takes any image size.
    """

    shared: ClassVar[str]  # the model's attribute
    uses_shared = True

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        asks = super().asks(model, module)
        bias = FEATURES["relative_bias"]
        if bias not in asks and getattr(module, "uses_shared", True) and given(model, module, cls.shared):
            asks.append(bias)
        return asks

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        if feature == "relative_bias":
            module.uses_shared = False

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        for owner in model.modules():
            inside = [module for module in owner.modules() if isinstance(module, cls.original)]
            grids = next((module.grids for module in inside if isinstance(module, cls)), None)
            if grids is None:
                continue
            take_any_size(owner)
            if hasattr(owner, cls.shared) and not any(getattr(m, "uses_shared", True) for m in inside):
                setattr(owner, cls.shared, None)
            if stem(owner) is not None:
                for module in list(owner.modules()):
                    if type(module) in FOLLOWERS:
                        module.__class__ = FOLLOWERS[type(module)]
                        module.grids = grids  # type: ignore[assignment]


def take_any_size(owner: nn.Module) -> None:
    """Let a model without absolute positions take images of any size: its patch embedding insists on one."""
    embed = stem(owner)
    if getattr(owner, "pos_embed", None) is None and isinstance(embed, PatchEmbed):
        embed.strict_img_size = False
