"""A backbone of a few strided convolutions, in place of a real one."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StandIn(nn.Module):
    """Patches of patches: no place sees beyond its own part of the image, and padding is zeroed."""

    strides = (4, 8, 16, 32)

    def __init__(self, channels: tuple[int, int, int, int] = (8, 16, 24, 32)) -> None:
        super().__init__()
        self.channels = channels
        pairs = zip((3, *channels), channels, (4, 2, 2, 2), strict=False)
        self.trunk = nn.ModuleList(nn.Conv2d(inputs, outputs, step, step) for inputs, outputs, step in pairs)

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        height, width = images.shape[-2:]
        sizes = torch.tensor([[height, width]], device=images.device) if sizes is None else sizes
        x, maps = F.pad(images, (0, -width % 32, 0, -height % 32)), []
        for stride, layer in zip(self.strides, self.trunk, strict=True):
            rows, columns = (torch.arange(side // stride, device=x.device) * stride for side in padded(height, width))
            seen = (rows < sizes[:, :1])[:, :, None] & (columns < sizes[:, 1:])[:, None]
            x = F.gelu(layer(x)) * seen[:, None]
            maps.append(x[..., : -(-height // stride), : -(-width // stride)])
        return maps


def padded(*size: int) -> list[int]:
    return [-(-side // 32) * 32 for side in size]
