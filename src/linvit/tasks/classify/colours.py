"""Colour operations on whole batches, each picture with its own strength. Pixels are floats from 0 to 255, and the
results are Pillow's within rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def each(values: Tensor) -> Tensor:
    """One value for each picture, `(batch,)`, ready for `(batch, channels, height, width)`."""
    return values.view(-1, 1, 1, 1)


def grey(images: Tensor) -> Tensor:
    """Luminance, `(batch, 1, height, width)`."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).round()[:, None]


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Pillow's enhancement: factor 0 is the other picture, 1 no change, more than 1 away from the other."""
    return (other + each(factor) * (images - other)).clamp(0, 255)


def mean_grey(images: Tensor) -> Tensor:
    """The mean luminance, `(batch, 1, 1, 1)`: what contrast blends with."""
    return (grey(images).mean((2, 3), keepdim=True) + 0.5).floor()


def smooth(images: Tensor) -> Tensor:
    """Pillow's smoothing (ones around a five, over 13), which sharpness blends with; the rim stays as it is."""
    inner = (9 * F.avg_pool2d(images, 3, stride=1) + 4 * images[..., 1:-1, 1:-1]) / 13
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device).view(-1, 1)
    columns = torch.arange(width, device=images.device)
    rim = (rows == 0) | (rows == height - 1) | (columns == 0) | (columns == width - 1)
    return torch.where(rim, images, F.pad(inner, (1, 1, 1, 1)).round())


def jitter(images: Tensor, u: Tensor, strength: float) -> Tensor:
    """torchvision's colour jitter from uniform numbers `(batch, 3)`: brightness, contrast, saturation, in that order,
    where torchvision shuffles the order."""
    low = max(0.0, 1 - strength)
    bright, contrast, colour = (low + (1 + strength - low) * u).unbind(1)
    images = blend(images, torch.zeros_like(images[:1]), bright)
    images = blend(images, mean_grey(images), contrast)
    return blend(images, grey(images), colour)


def autocontrast(images: Tensor) -> Tensor:
    """Each channel stretched to the full range."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    stretched = ((images - low) * (255 / (high - low).clamp(min=1e-6))).floor().clamp(0, 255)
    return torch.where(high > low, stretched, images)


def equalise(images: Tensor) -> Tensor:
    """Each channel's histogram made flat, by Pillow's table. Sorted pixels give the histogram: counting into bins would
    not repeat itself on a GPU without detours."""
    levels = images.round().to(torch.uint8).flatten(2)
    ordered = levels.sort(-1).values
    edges = torch.arange(256, dtype=torch.uint8, device=images.device).expand(*levels.shape[:2], 256).contiguous()
    below = torch.searchsorted(ordered, edges)  # pixels darker than each level
    step = below.gather(2, ordered[..., -1:].long()) // 255
    safe = step.clamp(min=1)
    table = torch.where(step > 0, ((below + safe // 2) // safe).clamp(max=255), edges)
    return table.gather(2, levels.long()).view(images.shape).to(images.dtype)


def posterise(images: Tensor, bits: Tensor) -> Tensor:
    """The highest bits only."""
    step = torch.exp2(8 - each(bits))
    return (images / step).floor() * step


def solarise(images: Tensor, threshold: Tensor) -> Tensor:
    """Inverted from a threshold on."""
    return torch.where(images < each(threshold), images, 255 - images)


def solarise_add(images: Tensor, added: Tensor) -> Tensor:
    """The dark half made lighter."""
    return torch.where(images < 128, (images + each(added)).clamp(max=255), images)
