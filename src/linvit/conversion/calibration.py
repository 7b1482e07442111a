"""Images for measuring a model: files from a folder, prepared the way the model wants them."""

from collections.abc import Iterator
from pathlib import Path

import torch
from timm.data import create_transform, resolve_model_data_config
from timm.utils.misc import natural_key
from torch import Tensor, nn

from linvit.conversion.convert import own_size
from linvit.errors import LinvitError, Unreadable
from linvit.images import eight_bits, images_below, naming, open_image, read_all, upright


def calibration_images(
    folder: Path, model: nn.Module, images: int = 256, batch: int = 32, size: tuple[int, int] | None = None
) -> Iterator[Tensor]:
    """Batches of at most `images` images, taken evenly from all files below the folder, in evaluation transforms and at
    the model's own size unless told. All of these that cannot be read are named at once."""
    if not folder.is_dir():
        raise LinvitError(f"{folder} is no folder of images")
    config = resolve_model_data_config(model)
    config["input_size"] = (config["input_size"][0], *(size or own_size(model)))
    files = sorted(images_below(folder), key=natural_key)
    if not files:
        raise LinvitError(f"no images in {folder}")
    count = min(images, len(files))
    chosen = [files[i * len(files) // count] for i in range(count)]
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    mode = "RGB"
    if first is not None and first.in_channels == 1:  # which timm's config does not say
        mode, config["input_size"] = "L", (1, *config["input_size"][1:])
        config |= {name: (sum(config[name]) / len(config[name]),) for name in ("mean", "std")}
    transform = create_transform(**config)

    def read(file: str) -> Tensor:
        with naming(file, "replace it or take it out"), open(file, "rb") as opened:
            picture = upright(open_image(opened))
            picture.load()
            return transform(eight_bits(picture).convert(mode))

    for start in range(0, count, batch):
        try:
            made = [read(file) for file in chosen[start : start + batch]]
        except Unreadable:
            read_all(read, chosen[start:])
            raise
        yield torch.stack(made)
