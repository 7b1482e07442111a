"""Random resized crop, flip and affine maps of a whole batch in one resampling.

Every map is from a place in the output to the place it is read from, in pixels, so maps compose before any pixel is
touched: a picture is interpolated once however many maps there are. Crops are drawn as torchvision draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ATTEMPTS = 4  # torchvision tries ten times; a square picture has used these up three times in ten thousand
CROP_COLUMNS = 2 * ATTEMPTS + 2


class Boxes(NamedTuple):
    """One box for each picture, `(batch,)` each, in whole pixels."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def draw_boxes(u: Tensor, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]) -> Boxes:
    """Crops from uniform numbers `(batch, CROP_COLUMNS)`: a share of the area, an aspect ratio, a place.

    The first attempt that fits counts; where none does, the whole picture.
    """
    area = size[0] * size[1] * (scale[0] + (scale[1] - scale[0]) * u[:, :ATTEMPTS])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * u[:, ATTEMPTS : 2 * ATTEMPTS])
    heights, widths = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (widths > 0) & (widths <= size[1]) & (heights > 0) & (heights <= size[0])
    first = fits & (fits.cumsum(1) == 1)
    none = ~fits.any(1)
    height = torch.where(none, float(size[0]), (heights * first).sum(1))
    width = torch.where(none, float(size[1]), (widths * first).sum(1))
    return Boxes((u[:, -2] * (size[0] - height + 1)).floor(), (u[:, -1] * (size[1] - width + 1)).floor(), height, width)


class Affine(NamedTuple):
    """`(x, y) -> (a·x + b·y + c, d·x + e·y + f)`, Pillow's order, `(batch,)` each."""

    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    e: Tensor
    f: Tensor


def resample(
    images: Tensor,
    boxes: Boxes,
    flip: Tensor,
    size: tuple[int, int],
    affines: Sequence[Affine] = (),
    fill: Tensor | None = None,
) -> Tensor:
    """Crop, then flip, then the affine maps in their order, onto `size`. What an affine map reads from outside its
    frame gets the fill colour `(channels,)`."""
    height, width = size
    x = (torch.arange(width, device=images.device) + 0.5).view(1, 1, width)
    y = (torch.arange(height, device=images.device) + 0.5).view(1, height, 1)
    inside: Tensor | None = None
    for affine in reversed(affines):
        a, b, c, d, e, f = (value.view(-1, 1, 1) for value in affine)
        x, y = a * x + b * y + c, d * x + e * y + f
        here = (x >= 0) & (x <= width) & (y >= 0) & (y <= height)
        inside = here if inside is None else inside & here
    x = torch.where(flip.view(-1, 1, 1), width - x, x)
    top, left, tall, wide = (value.view(-1, 1, 1) for value in boxes)
    # Half a pixel at the rim of a crop would read across it: a crop knows nothing of what is beyond.
    x = (x * (wide / width)).clamp(min=0.5).minimum(wide - 0.5) + left
    y = (y * (tall / height)).clamp(min=0.5).minimum(tall - 0.5) + top
    x, y = 2 * x / images.shape[-1] - 1, 2 * y / images.shape[-2] - 1
    grid = torch.stack(torch.broadcast_tensors(x, y), dim=-1)
    out = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    if inside is not None:
        assert fill is not None
        out = torch.where(inside[:, None], out, fill.view(1, -1, 1, 1))
    return out
