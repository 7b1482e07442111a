"""Coloured shapes to segment, and a small backbone in place of a transformer's."""

import torch
from torch import Tensor, nn

from linvit.models.dense import IGNORED

COLOURS = torch.tensor([[0.1, 0.1, 0.1], [0.9, 0.2, 0.1], [0.1, 0.3, 0.9]])  # background, box, disc
CLASSES = len(COLOURS)


class Strided(nn.Module):
    """Four maps from convolutions of stride 2, at the sizes that every backbone keeps to."""

    strides = (4, 8, 16, 32)

    def __init__(self, channels: tuple[int, int, int, int] = (16, 24, 24, 32)) -> None:
        super().__init__()
        self.channels = channels
        self.trunk = nn.ModuleList()
        before = 3
        for level, width in enumerate(channels):
            steps = [half(before, width), half(width, width)] if level == 0 else [half(before, width)]
            self.trunk.append(nn.Sequential(*steps))
            before = width
        self.sizes: Tensor | None = None

    def no_weight_decay(self) -> set[str]:
        return {"trunk.0.0.0.bias"}

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        self.sizes = sizes
        maps = []
        for stage in self.trunk:
            images = stage(images)
            maps.append(images)
        return maps


def half(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, 2, 1), nn.GroupNorm(4, outside), nn.GELU())


def shapes(count: int = 2, height: int = 64, width: int = 64) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Images with a box and a disc at places of their own, and their targets."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    images, targets = [], []
    for _ in range(count):
        top, left = (int(torch.randint(2, side // 3, (), generator=generator)) for side in (height, width))
        labels = torch.zeros(height, width, dtype=torch.long)
        labels[top : top + height // 3, left : left + width // 3] = 1
        y, x = height - top - height // 5, width - left - width // 5
        labels[(rows - y) ** 2 + (columns - x) ** 2 < (min(height, width) // 5) ** 2] = 2
        noise = 0.05 * torch.randn(height, width, 3, generator=generator)
        images.append(((COLOURS[labels] + noise - 0.45) / 0.25).permute(2, 0, 1))
        targets.append({"labels": labels, "size": torch.tensor([height, width])})
    return torch.stack(images), targets


def ignored(height: int = 64, width: int = 64) -> dict[str, Tensor]:
    """The target of an image without a label."""
    return {"labels": torch.full((height, width), IGNORED), "size": torch.tensor([height, width])}
