"""Which grid a sequence of tokens lies on, for hosts that see no more: hooks where a picture was last seen."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from timm.models.crossvit import CrossAttention, CrossVit
from timm.models.csatv2 import PosConv
from timm.models.edgenext import SplitTransposeBlock
from timm.models.efficientformer import EfficientFormerStage
from timm.models.gemma4_vit import Gemma4PatchEmbed
from timm.models.metaformer import MetaFormerStage
from timm.models.mobilevit import MobileVitBlock
from timm.models.nest import NestLevel
from timm.models.nextvit import NextTransformerBlock
from timm.models.pit import Pooling
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from linvit.attention import TokenGrid

if TYPE_CHECKING:
    from linvit.conversion.host import Host


def stem(owner: nn.Module) -> nn.Module | None:
    """The patch embedding of a model, whatever timm calls it."""
    names = ("patch_embed", "embeds", "pixel_embed", "stem_dct", "patch_embedding")
    patches = getattr(owner, "patch_embeddings", None)  # Hugging Face's
    inside = patches if isinstance(patches, nn.Conv2d) else getattr(patches, "projection", None)
    found = (*(getattr(owner, name, None) for name in names), inside)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def prefix_tokens(owner: nn.Module) -> int:
    """How many class and register tokens a model has; Hugging Face's embeddings hold them without counting."""
    if not type(owner).__module__.startswith("transformers."):
        return getattr(owner, "num_prefix_tokens", getattr(owner, "num_tokens", 0))
    tokens = (getattr(owner, name, None) for name in ("cls_token", "distillation_token", "register_tokens"))
    classes = int(getattr(owner, "class_embedding", None) is not None)
    return classes + sum(token.shape[1] for token in tokens if isinstance(token, Tensor))


class Grids:
    """The grid of the image now passing through. Hooks on the stem, or on a block's first convolution, write it."""

    def __init__(self, prefix: int = 0) -> None:
        self.prefix = prefix
        self.grid: TokenGrid | None = None
        self.owner: Any = None  # the model, while `convert` asks which grids its hosts see

    def follow(self, owner: nn.Module) -> list[RemovableHandle]:
        """Hook the stem of a model, and whatever else on the way changes the grid: PiT's pooling, CSATv2's stages."""
        embed = stem(owner)
        assert embed is not None
        self.prefix = prefix_tokens(owner)
        if hasattr(embed, "dynamic_feat_size") or isinstance(embed, Gemma4PatchEmbed):
            handles = [embed.register_forward_pre_hook(self.before_patches)]
        elif hasattr(owner, "resize_positional_embeddings"):
            handles = [owner.register_forward_pre_hook(self.before_ready_patches, with_kwargs=True)]
        else:
            handles = [embed.register_forward_hook(self.after_stem)]
        for module in owner.modules():
            if isinstance(module, Pooling):
                handles.append(module.conv.register_forward_hook(self.after_stem))
            if isinstance(module, PosConv):
                handles.append(module.register_forward_pre_hook(self.before_position))
        return handles

    def before_patches(self, embed: Any, args: tuple[Any, ...]) -> None:
        """Forward pre-hook for timm's PatchEmbed and its likes. Ready-made patches (NaFlexViT) have no one grid."""
        self.grid = None
        if args[0].ndim == 4:
            height, width = args[0].shape[-2], args[0].shape[-1]
            if hasattr(embed, "dynamic_feat_size"):
                height, width = embed.dynamic_feat_size((height, width))
            else:
                height, width = height // embed.patch_size[0], width // embed.patch_size[1]
            self.grid = TokenGrid(height, width, self.prefix)

    def before_ready_patches(self, owner: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Forward pre-hook for SigLIP 2's embedding, which gets patches and the sizes of the pictures they are from: a
        grid where all have one and none is padded."""
        patches, sizes = (*args, *named.values())
        self.grid = None
        if sizes.device.type != "meta" and not torch.compiler.is_compiling():
            first = TokenGrid(*sizes[0].tolist())
            same = bool((sizes == sizes[0]).all()) and first.tokens == patches.shape[1]
            self.grid = first if same else None

    def before_position(self, position: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook for a convolutional position encoding, called with the size of the picture."""
        self.grid = TokenGrid(args[1][0], args[1][1], self.prefix)

    def after_stem(self, stem: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """Forward hook for a stem with pictures as output, or with tokens and their size as XCiT's."""
        self.grid = None
        if isinstance(out, Tensor) and out.ndim == 4:
            self.grid = TokenGrid(out.shape[-2], out.shape[-1], self.prefix)
        elif isinstance(out, tuple) and isinstance(out[1], tuple):
            self.grid = TokenGrid(out[1][0], out[1][1], self.prefix)


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


def watch(model: Any, kind: "type[Host]") -> Iterator[Watch]:
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


def follow_grids(model: nn.Module, kind: "type[Host]") -> None:
    """Give hosts of this kind the grid of the picture their sequence comes from, inside the model or at its stem."""
    for found in watch(model, kind):
        for module in found.modules:
            module.grids = found.grids  # type: ignore[assignment]
    for owner in model.modules():
        if stem(owner) is None:
            continue
        new = [module for module in owner.modules() if isinstance(module, kind) and module.grids is None]
        if not new:
            continue
        served = (getattr(module, "grids", None) for module in owner.modules() if hasattr(module, "mechanism"))
        grids: Any = next((grids for grids in served if grids is not None), None)
        if grids is None:
            grids = Grids()
            grids.follow(owner)
        for host in new:
            host.grids = grids
