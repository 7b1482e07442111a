"""Crops of pictures of any size, each brought to the model's size: by Pillow, or a whole batch on the device.

Both read a crop through the same filter, widened where pixels become fewer, and nothing beyond the crop, so they agree
to one grey level. On the device the two directions of the filter are two products with matrices of weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from linvit.conversion.calibration import eight_bits

LARGE = (
    1024  # pixels of a side above which a crop is shrunk alone: those shrunk together all take the room of the largest
)
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
REACH = {"bilinear": 1, "bicubic": 2}  # of a filter, in pixels


def hull(box: Sequence[float], height: int, width: int) -> tuple[int, int, int, int]:
    """The whole pixels that a box (top, left, height, width) touches: first and last row, first and last column."""
    top, left, tall, wide = box
    bottom, right = math.ceil(top + tall - 1e-3), math.ceil(left + wide - 1e-3)
    return int(top + 1e-3), min(bottom, height), int(left + 1e-3), min(right, width)


def cut(picture: Image.Image, box: Sequence[float], size: tuple[int, int], mode: str, how: str) -> Tensor:
    """A crop (top, left, height, width) of a picture, uint8 `(channels, *size)`. A JPEG that has not been decoded yet
    is decoded at the scale that will do."""
    height, width = size
    before = picture.size
    fewer = math.ceil(before[0] * width / box[3]), math.ceil(before[1] * height / box[2])
    if 2 * fewer[0] <= before[0] and 2 * fewer[1] <= before[1]:
        picture.draft(picture.mode, fewer)
    down, across = picture.height / before[1], picture.width / before[0]
    top, left, tall, wide = box[0] * down, box[1] * across, box[2] * down, box[3] * across
    first, last, start, stop = hull((top, left, tall, wide), picture.height, picture.width)
    picture = in_mode(picture, mode).crop((start, first, stop, last))
    left, top = max(left - start, 0), max(top - first, 0)
    inner = (left, top, min(left + wide, picture.width), min(top + tall, picture.height))
    return channels_first(picture.resize((width, height), PILLOW[how], box=inner))


def in_mode(picture: Image.Image, mode: str) -> Image.Image:
    """The decoded picture in a mode of Pillow's, not copied where it has it."""
    picture = eight_bits(picture)
    return picture if picture.mode == mode else picture.convert(mode)


def channels_first(picture: Image.Image) -> Tensor:
    values = torch.from_numpy(np.array(picture))
    return values.permute(2, 0, 1) if values.ndim == 3 else values[None]


def cut_all(pictures: Sequence[Tensor], boxes: Tensor, size: tuple[int, int], filters: Sequence[str]) -> Tensor:
    """Crops of decoded pictures, uint8 `(channels, height, width)` each, by boxes `(pictures, 4)` on the host. Large
    ones are shrunk one by one, the others together."""
    large = (boxes[:, 2:] > LARGE).any(1).tolist()
    groups: dict[tuple[str, int], list[int]] = {}
    for row, how in enumerate(filters):
        groups.setdefault((how, row if large[row] else -1), []).append(row)
    found = [shrink([pictures[row] for row in rows], boxes[rows], size, how) for (how, _), rows in groups.items()]
    order = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
    return torch.cat(found)[order.to(pictures[0].device)]


def shrink(pictures: Sequence[Tensor], boxes: Tensor, size: tuple[int, int], how: str) -> Tensor:
    """One filter's crops in one go, through rows and columns of weights."""
    device = pictures[0].device
    kind = torch.float16 if device.type == "cuda" else torch.float32
    hulls = [hull(box, *picture.shape[1:]) for picture, box in zip(pictures, boxes.tolist(), strict=True)]
    parts = [p[:, top:bottom, left:right] for p, (top, bottom, left, right) in zip(pictures, hulls, strict=True)]
    tall, wide = (max(part.shape[side] for part in parts) for side in (1, 2))
    whole = pictures[0].new_zeros(len(parts), len(parts[0]), tall, wide)
    for row, part in enumerate(parts):
        whole[row, :, : part.shape[1], : part.shape[2]].copy_(part)
    corners = torch.tensor([(top, left) for top, _, left, _ in hulls])
    shapes = torch.tensor([part.shape[1:] for part in parts])
    down, across = (
        weights(boxes[:, side] - corners[:, side], boxes[:, 2 + side], shapes[:, side], room, size[side], how, device)
        for side, room in enumerate((tall, wide))
    )
    found = down.to(kind)[:, None] @ whole.to(kind) @ across.to(kind)[:, None].mT
    return found.float().round().clamp(0, 255).to(torch.uint8)


def weights(
    start: Tensor, length: Tensor, pixels: Tensor, room: int, count: int, how: str, device: torch.device
) -> Tensor:
    """What each of `room` pixels adds to each of `count` new ones, `(pictures, count, room)`. Of the old ones the first
    `pixels` are there, and the new ones lie evenly on `length` from `start` on."""
    start, length, pixels = (value.float().to(device)[:, None, None] for value in (start, length, pixels))
    step = length / count
    places = start + (torch.arange(count, device=device)[:, None] + 0.5) * step
    source = torch.arange(room, device=device)
    x = ((source + 0.5 - places) / step.clamp(min=1)).abs()
    near = 1 - x
    if how == "bicubic":
        near = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2)
    near = torch.where((x < REACH[how]) & (source < pixels), near, 0)
    return near / near.sum(-1, keepdim=True)
