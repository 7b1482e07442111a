"""Images for measuring a model: files from a folder, prepared the way the model wants them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from timm.data import ImageDataset, create_transform, resolve_model_data_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from linvit.errors import LinvitError


def calibration_images(folder: Path, model: nn.Module, images: int = 256, batch: int = 32) -> Iterator[Tensor]:
    """Batches of at most `images` images, taken evenly from all files below the folder, in evaluation transforms.

    An unreadable file is skipped with a warning, as timm's data sets do.
    """
    if not folder.is_dir():
        raise LinvitError(f"{folder} is no folder of images")
    config = resolve_model_data_config(model)
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)  # a model built or resampled for another
    if fixed is not None:
        config["input_size"] = (config["input_size"][0], *fixed)
    try:
        data = ImageDataset(str(folder), transform=create_transform(**config))
    except RuntimeError as error:
        raise LinvitError(f"no images in {folder}") from error
    count = min(images, len(data))
    chosen = [i * len(data) // count for i in range(count)]
    for pictures, _ in DataLoader(Subset(data, chosen), batch):
        yield torch.as_tensor(pictures)
