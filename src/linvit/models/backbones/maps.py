"""Sizes of maps: padding, cropping, validity and strides. A map of stride s has `ceil(pixels / s)` places a side."""

import torch
from torch import Tensor
from torch.nn import functional as F


def places(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Height and width of the map that a stride makes of an image."""
    return -(-size[0] // stride), -(-size[1] // stride)


def pad_to(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images with zeros at the right and the bottom."""
    bottom, right = size[0] - images.shape[-2], size[1] - images.shape[-1]
    return F.pad(images, (0, right, 0, bottom)) if bottom or right else images


def crop_to(picture: Tensor, size: tuple[int, int]) -> Tensor:
    return picture[..., : size[0], : size[1]]


def inside(sizes: Tensor, stride: int, size: tuple[int, int]) -> Tensor:
    """Which places of a map show some of their image, `(batch, 1, height, width)`; `sizes` are without padding."""
    rows, columns = (torch.arange(side, device=sizes.device) * stride for side in size)
    return (rows[None, :, None] < sizes[:, 0, None, None])[:, None] & (columns < sizes[:, 1, None, None])[:, None]


def to_stride(picture: Tensor, have: int | float, want: int, size: tuple[int, int]) -> Tensor:
    """A map at another stride, for images of this size, bilinear and in place to the pixel: an image's left and upper
    edge are those of its map, and the map's last places are repeated where they end before the image does."""
    wanted = places(size, want)
    if have != want:
        more = 2 + int(want // have)
        picture = F.pad(picture, (0, more, 0, more), mode="replicate")
        picture = F.interpolate(picture, scale_factor=have / want, mode="bilinear", recompute_scale_factor=False)
    return crop_to(picture, wanted)
