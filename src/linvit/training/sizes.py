"""Image sizes by turns, as EfficientViT trains."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.training.config import Config


def resized(images: Tensor, config: Config, step: int) -> Tensor:
    """The images in this step's size, which all processes draw alike; as they are where there is but one size."""
    if not config.random_sizes:
        return images
    draw = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    size = config.random_sizes[int(torch.randint(len(config.random_sizes), (), generator=draw))]
    return images if images.shape[-1] == size else F.interpolate(images, size, mode="bicubic", antialias=True)
