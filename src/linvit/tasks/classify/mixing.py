"""Random erasing, mixup and cutmix on the device, drawn as timm draws them and repeatable from their numbers.

timm's own classes draw from global generators, and erase picture by picture. These take their random numbers as
arguments, so the same step always gives the same batch, and work on the whole batch at once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.tasks.classify.preprocessing import Augmentation, seed_of

ERASE_ATTEMPTS = 3
ERASE_COLUMNS = 2 * ERASE_ATTEMPTS + 3
ERASE_AREA, ERASE_ASPECT = (0.02, 1 / 3), 0.3
NOISES = 64  # pictures of noise drawn for each step; more pictures share them


def draw_erased(u: Tensor, size: tuple[int, int], prob: float) -> Tensor:
    """The erased pixels `(batch, height, width)` from uniform numbers `(batch, ERASE_COLUMNS)`.

    A rectangle with 2 % to a third of the area; the first attempt that fits counts, and where none does, nothing."""
    height, width = size
    n = ERASE_ATTEMPTS
    area = height * width * (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * u[:, :n])
    aspect = torch.exp(math.log(ERASE_ASPECT) * (1 - 2 * u[:, n : 2 * n]))
    heights, widths = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (heights < height) & (widths < width)
    first = fits & (fits.cumsum(1) == 1) & (u[:, -1:] < prob)
    tall, wide = (heights * first).sum(1), (widths * first).sum(1)
    top, left = (u[:, -3] * (height - tall + 1)).floor(), (u[:, -2] * (width - wide + 1)).floor()
    return inside(top, top + tall, left, left + wide, size)


def inside(top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, size: tuple[int, int]) -> Tensor:
    """The pixels of boxes, `(boxes, height, width)`."""
    rows = torch.arange(size[0], device=top.device).view(1, -1, 1)
    columns = torch.arange(size[1], device=top.device).view(1, 1, -1)
    top, bottom, left, right = (value.view(-1, 1, 1) for value in (top, bottom, left, right))
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)


def erase(images: Tensor, erased: Tensor, noise: Tensor) -> Tensor:
    """Put noise, `(pictures, channels, height, width)`, in the place of the erased pixels."""
    shared = noise[torch.arange(len(images), device=images.device) % len(noise)]
    return torch.where(erased[:, None], shared, images)


def mixing_table(augmentation: Augmentation, steps: int, seed: int, epoch: int) -> Tensor:
    """How each step of an epoch mixes, `(steps, 4)`: λ, whether by cutmix, and the middle of the box.

    λ = 1 leaves a batch as it is. Drawn on the host, where there is a beta distribution that takes a seed."""
    draw = np.random.default_rng(seed_of(seed, epoch, 1))
    if augmentation.mixup > 0 and augmentation.cutmix > 0:
        cut = draw.random(steps) < augmentation.mixup_switch
    else:
        cut = np.full(steps, augmentation.cutmix > 0)
    mixup, cutmix = (draw.beta(alpha or 1, alpha or 1, steps) for alpha in (augmentation.mixup, augmentation.cutmix))
    share = np.where(cut, cutmix, mixup)
    share[draw.random(steps) >= augmentation.mixup_prob] = 1
    table = np.stack([share, cut, draw.random(steps), draw.random(steps)], axis=1)
    return torch.from_numpy(table.astype(np.float32))


def mix(images: Tensor, labels: Tensor, row: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mix each picture with its neighbour (0 with 1, 2 with 3, …), by a row of the table, and the labels likewise.

    timm pairs the first picture with the last; in a shuffled batch that is the same, and neighbours stay together when
    a batch is shared out to processes.
    """
    height, width = images.shape[-2:]
    share, cut, down, across = row.unbind()
    cut = cut > 0.5
    side = (1 - share).sqrt()
    tall, wide = (height * side).floor(), (width * side).floor()
    y, x = (down * height).floor(), (across * width).floor()
    top, bottom = (y - (tall / 2).floor()).clamp(0, height), (y + ((tall + 1) / 2).floor()).clamp(0, height)
    left, right = (x - (wide / 2).floor()).clamp(0, width), (x + ((wide + 1) / 2).floor()).clamp(0, width)
    box = inside(top, bottom, left, right, (height, width))[0]
    weight = torch.where(cut, 1 - box.float(), share)  # of the picture itself, for each pixel
    images = weight * images + (1 - weight) * neighbours(images)
    own = torch.where(cut, weight.mean(), share)
    targets = F.one_hot(labels, classes).float()
    return images, own * targets + (1 - own) * neighbours(targets)


def neighbours(values: Tensor) -> Tensor:
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
