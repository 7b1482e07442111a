"""The feature pyramid network (Lin et al., 2017), torchvision's, on the list of maps that a backbone gives."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool


def feature_pyramid(channels: Sequence[int], width: int = 256, *, pooled: bool = False) -> FeaturePyramidNetwork:
    """Maps of `width` channels at the backbone's strides; `pooled` adds one at twice the last stride, called `pool`."""
    return FeaturePyramidNetwork(list(channels), width, LastLevelMaxPool() if pooled else None)


def by_level(maps: Sequence[Tensor]) -> "OrderedDict[str, Tensor]":
    """The maps under the names that torchvision's modules know them by, `0` for the finest."""
    return OrderedDict((str(level), each) for level, each in enumerate(maps))
