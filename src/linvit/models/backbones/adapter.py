"""The ViT-Adapter (Chen et al., Vision Transformer Adapter for Dense Predictions, 2023): a plain ViT gets a pyramid
beside it.

A small convolutional net, the spatial prior, makes maps of strides 4 to 32. Those of strides 8, 16 and 32 are tokens
that talk with the ViT's in four interactions, each around a quarter of its blocks: an injector adds to the ViT's tokens
what they read from the pyramid's, and after the blocks an extractor, with a small MLP, brings the pyramid what it reads
from the ViT's; two more extractors follow the last. All read by deformable attention. Injectors begin with nothing.
The ViT goes without class and register tokens.

The released code wants sides that divide by 32. Here places are counted in pixels, which is the same for those and
makes any size work, and patches of any size.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.layers import DropPath
from timm.models import checkpoint
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.models.backbones.deformable import DeformableAttention, Shapes
from linvit.models.backbones.maps import places, to_stride
from linvit.models.backbones.trunks import STRIDES

EPS = 1e-6
INTERACTIONS = 4
# Deformable heads and the width of their values, up to which width of the ViT: those of the released T, S and B, and L.
SETTINGS = ((384, 6, 1.0), (768, 12, 0.5), (math.inf, 16, 0.5))


class Adapter(nn.Module):
    """What is added to a plain ViT; `channels` of all four maps are the ViT's width.

    `every_stage` adds the ViT's tokens after each interaction to the map of that rank, as the released segmenters do;
    their detectors, and the default, add the last to all. `drop_path` is that of the extractors' MLPs but those of the
    two that follow the last. MLPs have `mlp_ratio` of the width; with 0 there are none.
    """

    def __init__(
        self,
        name: str,
        trunk: Any,
        patch: int,
        *,
        heads: int | None = None,
        ratio: float | None = None,
        points: int = 4,
        mlp_ratio: float = 0.25,
        drop_path: float = 0.0,
        every_stage: bool = False,
        stem_width: int = 64,
    ) -> None:
        super().__init__()
        if not isinstance(trunk, VisionTransformer | Eva):
            raise LinvitError(f"the adapter goes with timm's ViT and EVA, and {name} is neither: use pyramid='simple'")
        depth, dim = len(trunk.blocks), trunk.embed_dim
        if depth < INTERACTIONS:
            raise LinvitError(f"the adapter needs {INTERACTIONS} blocks at least, and {name} has {depth}")
        usual = next((heads, ratio) for width, heads, ratio in SETTINGS if dim <= width)
        heads, ratio = heads or usual[0], ratio or usual[1]
        self.patch, self.every_stage = patch, every_stage
        self.channels = (dim,) * len(STRIDES)
        self.ends = tuple(depth * (i + 1) // INTERACTIONS for i in range(INTERACTIONS))
        self.prior = SpatialPrior(trunk.patch_embed.proj.in_channels, dim, stem_width)
        self.level_embed = nn.Parameter(torch.empty(len(STRIDES) - 1, dim))

        def extractor(drop_path: float = 0.0) -> Extractor:
            return Extractor(dim, DeformableAttention(dim, 1, heads, points, ratio), mlp_ratio, drop_path)

        self.injectors = nn.ModuleList(
            Injector(dim, DeformableAttention(dim, len(STRIDES) - 1, heads, points, ratio)) for _ in self.ends
        )
        self.extractors = nn.ModuleList(extractor(drop_path) for _ in self.ends)
        self.more_extractors = nn.ModuleList(extractor() for _ in range(2))
        self.up = nn.ConvTranspose2d(dim, dim, 2, stride=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(dim) for _ in STRIDES)
        self.apply(init_weights)
        for module in self.modules():
            if isinstance(module, DeformableAttention):
                module.begin()
        nn.init.normal_(self.level_embed)

    def forward(self, trunk: Any, images: Tensor, size: tuple[int, int], mask: Tensor | None = None) -> list[Tensor]:
        """The maps of images that were padded from this size for the trunk. `mask` is a key mask for its attention."""
        finest, levels = self.prior(images)
        shapes = [(level.shape[-2], level.shape[-1]) for level in levels]
        pyramid = torch.cat([to_tokens(m) + e for m, e in zip(levels, self.level_embed, strict=True)], dim=1)
        x, rope = embed(trunk, images)
        grid = [places((images.shape[-2], images.shape[-1]), self.patch)]
        near_patches = references(grid, [self.patch], shapes, STRIDES[1:], x.device)
        near_pyramid = references(shapes, STRIDES[1:], grid, [self.patch], x.device)
        seen, start = [], 0
        for i, (end, inject, extract) in enumerate(zip(self.ends, self.injectors, self.extractors, strict=True)):
            x = inject(x, near_patches, pyramid, shapes)
            for index in range(start, end):
                x = run_block(trunk, index, x, rope, mask)
            more = self.more_extractors if i == INTERACTIONS - 1 else ()
            for reader in (extract, *more):
                pyramid = reader(pyramid, near_pyramid, x, grid, shapes)
            seen.append(x)
            start = end
        maps = to_maps(pyramid, shapes)
        maps = [finest + self.up(maps[0])[..., : finest.shape[-2], : finest.shape[-1]], *maps]
        chosen = seen if self.every_stage else [x] * len(STRIDES)
        out = []
        for level, tokens, stride, norm in zip(maps, chosen, STRIDES, self.norms, strict=True):
            (picture,) = to_maps(tokens, grid)
            added = level + to_stride(picture, self.patch, stride, (images.shape[-2], images.shape[-1]))
            out.append(norm(added)[..., : places(size, stride)[0], : places(size, stride)[1]])
        return out


class SpatialPrior(nn.Module):
    """Convolutions with BatchNorm and ReLU, and a projection of each map to the ViT's width."""

    def __init__(self, in_chans: int, dim: int, width: int) -> None:
        super().__init__()
        stem = (block(in_chans, width, 2), block(width, width, 1), block(width, width, 1))
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, padding=1))
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stages = nn.ModuleList(block(before, after, 2) for before, after in pairwise(widths))
        self.projections = nn.ModuleList(nn.Conv2d(width, dim, 1) for width in widths)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The map of stride 4, and those of 8, 16 and 32."""
        maps = [self.stem(images)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        first, *others = (project(m) for project, m in zip(self.projections, maps, strict=True))
        return first, others


class Injector(nn.Module):
    """The ViT's tokens read from the pyramid's."""

    def __init__(self, dim: int, attention: DeformableAttention) -> None:
        super().__init__()
        self.query_norm, self.norm = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.attention = attention
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, near: Tensor, pyramid: Tensor, shapes: Shapes) -> Tensor:
        return x + self.gamma * self.attention(self.query_norm(x), near, self.norm(pyramid), shapes)


class Extractor(nn.Module):
    """The pyramid's tokens read from the ViT's, and an MLP with a 3×3 depthwise convolution over each level."""

    def __init__(self, dim: int, attention: DeformableAttention, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.query_norm, self.norm = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.attention = attention
        hidden = int(dim * mlp_ratio)
        self.mlp = ConvMlp(dim, hidden) if hidden else None
        self.mlp_norm = nn.LayerNorm(dim, eps=EPS) if hidden else None
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, pyramid: Tensor, near: Tensor, x: Tensor, grid: Shapes, shapes: Shapes) -> Tensor:
        pyramid = pyramid + self.attention(self.query_norm(pyramid), near, self.norm(x), grid)
        if self.mlp is not None and self.mlp_norm is not None:
            pyramid = pyramid + self.drop_path(self.mlp(self.mlp_norm(pyramid), shapes))
        return pyramid


class ConvMlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.widen = nn.Linear(dim, hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.narrow = nn.Linear(hidden, dim)

    def forward(self, pyramid: Tensor, shapes: Shapes) -> Tensor:
        maps = [self.depthwise(m) for m in to_maps(self.widen(pyramid), shapes)]
        return self.narrow(F.gelu(torch.cat([to_tokens(m) for m in maps], dim=1)))


def block(before: int, after: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU(inplace=True))


def embed(trunk: Any, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """The patch tokens with their positions, and the rotary table of an EVA."""
    x = trunk.patch_embed(images)
    if isinstance(trunk, Eva):
        x, rope = trunk._pos_embed(x)
        return trunk.norm_pre(x), rope
    return trunk.norm_pre(trunk.patch_drop(trunk._pos_embed(x))), None


def run_block(trunk: Any, index: int, x: Tensor, rope: Tensor | None, mask: Tensor | None) -> Tensor:
    """One block of the trunk, as the trunk itself runs it."""
    given: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
    if isinstance(trunk, Eva):
        given["rope"] = rope[index] if rope is not None and getattr(trunk, "rope_mixed", False) else rope
    if trunk.grad_checkpointing and torch.is_grad_enabled():
        return checkpoint(trunk.blocks[index], x, **given)
    return trunk.blocks[index](x, **given)


def references(
    queries: Shapes, strides: Sequence[int], maps: Shapes, map_strides: Sequence[int], device: torch.device
) -> Tensor:
    """Where the centres of some maps' places lie on other maps, `(queries, maps, 2)`, x and y from 0 to 1."""
    centres = []
    for (height, width), stride in zip(queries, strides, strict=True):
        y, x = ((torch.arange(side, device=device) + 0.5) * stride for side in (height, width))
        centres.append(torch.stack((x.expand(height, width), y[:, None].expand(height, width)), dim=-1).flatten(0, 1))
    pixels = torch.cat(centres)
    on = [
        torch.stack((pixels[:, 0] / (width * stride), pixels[:, 1] / (height * stride)), dim=-1)
        for (height, width), stride in zip(maps, map_strides, strict=True)
    ]
    return torch.stack(on, dim=1)


def to_tokens(picture: Tensor) -> Tensor:
    return picture.flatten(2).transpose(1, 2)


def to_maps(tokens: Tensor, shapes: Shapes) -> list[Tensor]:
    """Maps that lie one behind the other as tokens."""
    parts = tokens.split([height * width for height, width in shapes], dim=1)
    return [part.transpose(1, 2).unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def init_weights(module: nn.Module) -> None:
    """As released: normal ones of 0.02 in linear layers, and of the square root of 2 over what goes out of a kernel in
    convolutions; no bias."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        outgoing = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2.0 / outgoing))
    else:
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)
