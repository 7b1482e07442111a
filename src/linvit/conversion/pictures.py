"""Grids for hosts deep inside a model that only see a sequence: a hook where the picture was last seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from timm.models.crossvit import CrossAttention, CrossVit
from timm.models.edgenext import SplitTransposeBlock
from timm.models.efficientformer import EfficientFormerStage
from timm.models.metaformer import MetaFormerStage
from timm.models.mobilevit import MobileVitBlock
from timm.models.nest import NestLevel
from timm.models.nextvit import NextTransformerBlock
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from linvit.attention import Mechanism, TokenGrid
from linvit.conversion.host import Grids, Host


class PatchGrids(Grids):
    """MobileViT cuts the picture into patches, enlarging it first where they do not fit; each patch is a token."""

    def __init__(self, patch: tuple[int, int]) -> None:
        super().__init__()
        self.patch = patch

    def after_stem(self, stem: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        height, width = (-(-side // patch) for side, patch in zip(out.shape[-2:], self.patch, strict=True))
        self.grid = TokenGrid(height, width)


@dataclass(frozen=True)
class Watch:
    """Attention modules and the grid of what they now see."""

    grids: Grids
    modules: list[nn.Module]
    handles: list[RemovableHandle] = field(default_factory=list)


def sources(owner: Any) -> Iterator[tuple[Grids, nn.Module | None, list[nn.Module]]]:
    """Where a block's sequences come from: the grids to fill, the module that puts out the picture, who sees it."""
    inside = list(owner.modules())
    if isinstance(owner, MobileVitBlock):
        yield PatchGrids(owner.patch_size), owner.conv_1x1, inside
    elif isinstance(owner, MetaFormerStage | EfficientFormerStage):
        yield Grids(), owner.downsample, inside
    elif isinstance(owner, NextTransformerBlock):
        yield Grids(), owner.patch_embed, inside
    elif isinstance(owner, SplitTransposeBlock):
        yield Grids(), owner.convs[0], inside
    elif isinstance(owner, NestLevel):
        fixed = Grids()
        fixed.grid = TokenGrid(owner.block_size, owner.block_size)
        yield fixed, None, inside
    elif isinstance(owner, CrossVit):
        embeds: list[Any] = list(owner.patch_embed)
        blocks: list[Any] = list(owner.blocks)
        for branch, embed in enumerate(embeds):
            seers: list[nn.Module] = []
            for block in blocks:
                seers += block.blocks[branch].modules() if block.blocks is not None else []
                seers += (m for m in block.fusion[branch - 1].modules() if isinstance(m, CrossAttention))
            yield Grids(prefix=1), embed.proj, seers


def watch(model: Any, kind: type[Host]) -> Iterator[Watch]:
    """The attention modules of this kind, converted or not, with a hook for those that none serves yet."""
    for owner in model.modules():
        for grids, picture, seers in sources(owner):
            modules: list[Any] = [module for module in seers if isinstance(module, kind.original)]
            served = next((m.grids for m in modules if getattr(m, "grids", None) is not None), None)
            if served is not None:
                yield Watch(served, modules)
            elif modules:
                handles = [] if picture is None else [picture.register_forward_hook(grids.after_stem)]
                yield Watch(grids, modules, handles)


def follow_pictures(model: nn.Module, kind: type[Host]) -> None:
    """Give the hosts of this kind the grid of the picture their sequence comes from."""
    for found in watch(model, kind):
        for module in found.modules:
            module.grids = found.grids  # type: ignore[assignment]


def after_projection(mechanism: Mechanism, picture: Tensor, q: Tensor) -> Tensor:
    """The mechanism's last word on a projected output that is a picture."""
    tokens = mechanism.after_projection(picture.flatten(2).transpose(1, 2), q)
    return tokens.transpose(1, 2).reshape(picture.shape)
