"""ViTDet's simple feature pyramid (Li et al., Exploring Plain Vision Transformer Backbones for Object Detection, 2022):
all four maps come from the last one of a plain ViT.

Deconvolutions double its resolution, with a norm and GELU between two of them, and max pooling halves it; then a 1×1
and a 3×3 convolution, each with a norm, make every map `width` channels wide. With patches of 16 pixels that is two
deconvolutions, one, none, and a pooling; with other patches the nearest number of them, and the maps are resized to
their strides where patches are no power of two.
"""

import math

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from linvit.models.backbones.maps import inside, to_stride
from linvit.models.backbones.trunks import STRIDES


class SimplePyramid(nn.Module):
    """`patch` is the stride of the map that it gets."""

    def __init__(self, dim: int, patch: int, width: int = 256) -> None:
        super().__init__()
        self.patch = patch
        self.channels = (width,) * len(STRIDES)
        self.doublings = tuple(round(math.log2(patch / stride)) for stride in STRIDES)
        self.scales = nn.ModuleList(rescale(dim, count) for count in self.doublings)
        self.inputs, self.outputs = nn.ModuleList(), nn.ModuleList()
        for count in self.doublings:
            narrowed = dim >> max(0, count)
            self.inputs.append(nn.Sequential(nn.Conv2d(narrowed, width, 1, bias=False), LayerNorm2d(width)))
            self.outputs.append(
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), LayerNorm2d(width)),
            )

    def forward(self, last: Tensor, size: tuple[int, int], sizes: Tensor | None = None) -> list[Tensor]:
        """The maps of images of this size from their last map. Given the images' sizes without padding, what is outside
        is not pooled and is zero to the 3×3 convolution, as beyond the edge of an image alone."""
        maps = []
        levels = zip(STRIDES, self.doublings, self.scales, self.inputs, self.outputs, strict=True)
        for stride, count, scale, narrow, smooth in levels:
            scaled = pool(scale, last, self.patch, sizes) if count < 0 else scale(last)
            level = to_stride(narrow(scaled), self.patch / 2**count, stride, size)
            if sizes is not None:
                level = level * inside(sizes, stride, (level.shape[-2], level.shape[-1]))
            maps.append(smooth(level))
        return maps


def pool(pooling: nn.Module, picture: Tensor, stride: int, sizes: Tensor | None) -> Tensor:
    """The largest of each place; what is outside takes no part, and is zero where there is nothing else."""
    if sizes is None:
        return pooling(picture)
    seen = inside(sizes, stride, (picture.shape[-2], picture.shape[-1]))
    pooled = pooling(picture.masked_fill(~seen, float("-inf")))
    return pooled.masked_fill(pooled == float("-inf"), 0.0)


def rescale(dim: int, doublings: int) -> nn.Module:
    """Deconvolutions that halve the channels with each doubling, or one pooling; an odd edge is kept."""
    if doublings <= 0:
        return nn.MaxPool2d(2**-doublings, ceil_mode=True) if doublings else nn.Identity()
    layers: list[nn.Module] = []
    for index in range(doublings):
        layers += [LayerNorm2d(dim >> index), nn.GELU()] if index else []
        layers.append(nn.ConvTranspose2d(dim >> index, dim >> (index + 1), 2, stride=2))
    return nn.Sequential(*layers)
