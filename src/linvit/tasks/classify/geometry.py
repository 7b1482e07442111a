"""Random resized crop, flip and affine maps of a whole batch in one resampling.

Every map is from a place in the output to the place it is read from, in pixels, so maps compose before any pixel is
touched: a picture is interpolated once however many maps there are. Crops are drawn as torchvision draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

ATTEMPTS = 4  # torchvision tries ten times; a square picture has used these up three times in ten thousand
CROP_COLUMNS = 2 * ATTEMPTS + 2
Affine = tuple[Tensor, ...]  # `(x, y) -> (a·x + b·y + c, d·x + e·y + f)`, Pillow's order, `(batch,)` each


def frames_of(shapes: Tensor, size: tuple[int, int]) -> Tensor:
    """The pixels that crops of pictures are drawn in, `(batch, 2)`, from the pictures' heights and widths: their shape,
    just large enough for the model's size."""
    return (shapes / (shapes / shapes.new_tensor(size)).amin(1, keepdim=True)).round()


def draw_boxes(
    u: Tensor, frames: tuple[int, int] | Tensor, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Crops, a box (top, left, height, width) in pixels for each picture, from uniform numbers `(batch, CROP_COLUMNS)`:
    a share of the area, an aspect ratio, a place. `frames` are the height and width of all pictures, or of each
    `(batch, 2)`.

    The first attempt that fits counts; where none does, the most of the middle that has such a ratio."""
    height, width = (
        u.new_full((1, 1), side) if isinstance(side, int) else side[:, None]
        for side in (frames if isinstance(frames, tuple) else frames.unbind(1))
    )
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:, :ATTEMPTS])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * u[:, ATTEMPTS : 2 * ATTEMPTS])
    heights, widths = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits & (fits.cumsum(1) == 1)
    none = ~fits.any(1)
    height, width = height[:, 0], width[:, 0]
    tall = torch.where(none, torch.minimum(height, width / ratio[0]).round(), (heights * first).sum(1))
    wide = torch.where(none, torch.minimum(width, height * ratio[1]).round(), (widths * first).sum(1))
    top, left = (u[:, -2] * (height - tall + 1)).floor(), (u[:, -1] * (width - wide + 1)).floor()
    middle = ((height - tall) / 2).floor(), ((width - wide) / 2).floor()
    return torch.stack([torch.where(none, middle[0], top), torch.where(none, middle[1], left), tall, wide], dim=1)


def resample(
    images: Tensor,
    boxes: Tensor,
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
    top, left, tall, wide = boxes.view(-1, 4, 1, 1).unbind(1)
    # Half a pixel at the rim of a crop would read across it: a crop knows nothing of what is beyond.
    x = (x * (wide / width)).clamp(min=0.5).minimum(wide - 0.5) + left
    y = (y * (tall / height)).clamp(min=0.5).minimum(tall - 0.5) + top
    x, y = 2 * x / images.shape[-1] - 1, 2 * y / images.shape[-2] - 1
    grid = torch.stack(torch.broadcast_tensors(x, y), dim=-1)
    out = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return out if inside is None or fill is None else torch.where(inside[:, None], out, fill.view(1, -1, 1, 1))
