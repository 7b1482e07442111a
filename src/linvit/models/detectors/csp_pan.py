"""CSP-PAN, the neck of PicoDet: three maps in, four of one width out, by depthwise convolutions (arXiv 2111.00902).

A top-down and a bottom-up path join neighbouring maps by cross stage partial layers. A fourth map at twice the last
stride is made of the last map before and after. Padding is zeroed before each convolution that reaches over its edge,
so that a padded image gets what it gets alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KERNEL = 5


def convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, hard swish."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.Hardswish())


class Separable(nn.Module):
    """A depthwise and a pointwise convolution."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.depthwise = convolution(width, width, KERNEL, stride, groups=width)
        self.pointwise = convolution(width, width)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """`padding`, `(batch, 1, height, width)`, is true where the map shows nothing of its image."""
        if padding is not None:
            x = x.masked_fill(padding, 0)
        return self.pointwise(self.depthwise(x))


class CrossStage(nn.Module):
    """Two maps, side by side, made one: half of the channels by a block, half past it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.main = convolution(2 * width, half)
        self.short = convolution(2 * width, half)
        self.expand = convolution(half, half)
        self.mix = Separable(half)
        self.join = convolution(2 * half, width)

    def forward(self, one: Tensor, other: Tensor, padding: Tensor | None) -> Tensor:
        both = torch.cat((one, other), dim=1)
        main = self.mix(self.expand(self.main(both)), padding)
        return self.join(torch.cat((main, self.short(both)), dim=1))


class CSPPAN(nn.Module):
    """Maps of `channels`, each at half the size of the one before, to four of `width`."""

    def __init__(self, channels: Sequence[int], width: int) -> None:
        super().__init__()
        steps = len(channels) - 1
        self.lateral = nn.ModuleList(convolution(inputs, width) for inputs in channels)
        self.top_down = nn.ModuleList(CrossStage(width) for _ in range(steps))
        self.shrink = nn.ModuleList(Separable(width, stride=2) for _ in range(steps))
        self.bottom_up = nn.ModuleList(CrossStage(width) for _ in range(steps))
        self.top_before = Separable(width, stride=2)
        self.top_after = Separable(width, stride=2)

    def forward(self, maps: Sequence[Tensor], padding: Sequence[Tensor | None]) -> list[Tensor]:
        maps = [lateral(each) for lateral, each in zip(self.lateral, maps, strict=True)]
        down = [maps[-1]]
        for level in reversed(range(len(maps) - 1)):
            larger = F.interpolate(down[0], size=maps[level].shape[-2:], mode="nearest")
            down.insert(0, self.top_down[level](larger, maps[level], padding[level]))
        up = [down[0]]
        for level in range(len(maps) - 1):
            smaller = self.shrink[level](up[-1], padding[level])
            up.append(self.bottom_up[level](smaller, down[level + 1], padding[level + 1]))
        return [*up, self.top_before(maps[-1], padding[-1]) + self.top_after(up[-1], padding[-1])]
