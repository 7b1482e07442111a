"""Images for measuring a model: files from a folder, prepared the way the model wants them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
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
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    mode = "RGB"
    if first is not None and first.in_channels == 1:  # which timm's config does not say
        mode, config["input_size"] = "L", (1, *config["input_size"][1:])
        config |= {name: (sum(config[name]) / len(config[name]),) for name in ("mean", "std")}
    transform = create_transform(**config)
    for start in range(0, count, batch):
        yield torch.stack([transform(whole(data[index][0], mode)) for index in chosen[start : start + batch]])


def eight_bits(picture: Image.Image) -> Image.Image:
    """A decoded picture with 8 bits a channel: of 16 the upper ones, where Pillow itself would cut at 255."""
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture)
        if picture.mode == "F" or values.min() < 0 or values.max() >= 2**16:
            raise ValueError(f"nobody knows how bright its pixels are (mode {picture.mode}): save it with 8 or 16 bits")
        wide = picture.mode != "I" or values.max() > 255
        return Image.fromarray((values >> 8 if wide else values).astype(np.uint8))
    if picture.mode == "P" and "transparency" in picture.info:
        return picture.convert("RGBA")  # Pillow warns of the short way
    return picture


def whole(picture: Image.Image, mode: str) -> Image.Image:
    """The decoded picture, or an error that names its file."""
    name = getattr(getattr(picture, "fp", None), "name", "of the folder")
    try:
        picture.load()
        return eight_bits(picture).convert(mode)
    except (OSError, SyntaxError, ValueError) as error:
        raise Unreadable(f"cannot read image {name}: {error}; replace it or take it out") from None
