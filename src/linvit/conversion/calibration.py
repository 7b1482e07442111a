"""Images for measuring a model: files from a folder, prepared the way the model wants them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from timm.data import ImageDataset, create_transform, resolve_model_data_config
from torch import Tensor, nn

from linvit.errors import LinvitError, Unreadable


def calibration_images(folder: Path, model: nn.Module, images: int = 256, batch: int = 32) -> Iterator[Tensor]:
    """Batches of at most `images` images, taken evenly from all files below the folder, in evaluation transforms.

    A file that is no image is skipped with a warning, as timm's data sets do; one that breaks off is an error.
    """
    if not folder.is_dir():
        raise LinvitError(f"{folder} is no folder of images")
    config = resolve_model_data_config(model)
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)  # a model built or resampled for another
    if fixed is not None:
        config["input_size"] = (config["input_size"][0], *fixed)
    try:
        data = ImageDataset(str(folder), input_img_mode=None)
    except RuntimeError as error:
        raise LinvitError(f"no images in {folder}") from error
    count = min(images, len(data))
    chosen = [i * len(data) // count for i in range(count)]
    transform = create_transform(**config)
    for start in range(0, count, batch):
        yield torch.stack([transform(whole(data[index][0])) for index in chosen[start : start + batch]])


def whole(picture: Image.Image) -> Image.Image:
    """The decoded picture, or an error that names its file."""
    name = getattr(getattr(picture, "fp", None), "name", "of the folder")
    try:
        return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise Unreadable(f"cannot read image {name}: {error}; replace it or take it out") from None
