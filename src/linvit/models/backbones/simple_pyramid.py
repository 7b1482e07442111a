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
        """The maps of images of this size from their last map. Given the images' sizes without padding, the 3×3
        convolution sees zeros outside, as at an image's edge."""
        maps = []
        levels = zip(STRIDES, self.doublings, self.scales, self.inputs, self.outputs, strict=True)
        for stride, count, scale, narrow, smooth in levels:
            level = to_stride(narrow(scale(last)), self.patch / 2**count, stride, size)
            if sizes is not None:
                level = level * inside(sizes, stride, (level.shape[-2], level.shape[-1]))
            maps.append(smooth(level))
        return maps


def rescale(dim: int, doublings: int) -> nn.Module:
    """Deconvolutions that halve the channels with each doubling, or one pooling; an odd edge is kept."""
    if doublings <= 0:
        return nn.MaxPool2d(2**-doublings, ceil_mode=True) if doublings else nn.Identity()
    layers: list[nn.Module] = []
    for index in range(doublings):
        layers += [LayerNorm2d(dim >> index), nn.GELU()] if index else []
        layers.append(nn.ConvTranspose2d(dim >> index, dim >> (index + 1), 2, stride=2))
    return nn.Sequential(*layers)
