"""Brightness, contrast, saturation and hue of a batch, varied as SSD varies them, on whatever device has the batch.

Image by image on the CPU this takes several times as long as all else that is done to an image, most of it for the
hue, and a GPU would wait for it.
"""

import torch
from torch import Tensor

from linvit.tasks.classify.randaugment import blend, each, grey


def vary(images: Tensor, colours: Tensor, inside: Tensor) -> Tensor:
    """Images of 0 … 255, `(batch, 3, height, width)`, in other colours by rows of `transforms.draw_colours`. Pixels not
    `inside` `(batch, height, width)` are padding: they do not count for the mean that contrast is about."""
    brightness, contrast, saturation, hue, late = colours.unbind(1)
    images = blend(images.float(), torch.zeros_like(images[:1], dtype=torch.float32), brightness)
    images = blend(images, mean_inside(images, inside), contrast)
    images = blend(images, grey(images), saturation)
    images = turn_hue(images, hue)
    return blend(images, mean_inside(images, inside), late)


def mean_inside(images: Tensor, inside: Tensor) -> Tensor:
    """The mean luminance, `(batch, 1, 1, 1)`, a whole number so that it does not depend on the order of a sum."""
    total = (grey(images) * inside[:, None]).sum((2, 3), keepdim=True, dtype=torch.float64)
    return (total / inside.sum((1, 2)).view(-1, 1, 1, 1).clamp(min=1)).round().float()


def turn_hue(images: Tensor, shift: Tensor) -> Tensor:
    """The colours turned by shares of the circle; value and saturation stay."""
    red, green, blue = images.unbind(1)
    most, least = images.amax(1), images.amin(1)
    spread = most - least
    safe = spread.clamp(min=1e-6)
    between = torch.where(most == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixths = torch.where(most == red, (green - blue) / safe, between)[:, None] + 6 * each(shift)
    place = (sixths + 5 - 2 * torch.arange(3, device=images.device).view(1, 3, 1, 1)) % 6  # of red, green and blue
    return most[:, None] - spread[:, None] * torch.minimum(place, 4 - place).clamp(0, 1)
