"""A photograph as a model sees it: the largest part of it that has the model's shape, at the model's size."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from linvit.conversion.convert import own_size
from linvit.errors import LinvitError
from linvit.images import check_file, eight_bits, naming, open_image, upright


@dataclass(frozen=True)
class View:
    """What of a photograph a model sees. `box` is left, top, right and bottom in the photograph's pixels."""

    name: str
    picture: Image.Image  # at the model's size
    box: tuple[float, float, float, float]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.picture.height, self.picture.width

    def input(self, model: nn.Module) -> Tensor:
        """`(1, channels, height, width)`, normalised as the model wants it, where the model is."""
        noted, like = resolve_model_data_config(model), next(model.parameters())
        mean, std = (torch.tensor(noted[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
        pixels = torch.from_numpy(np.array(self.picture)).permute(2, 0, 1)[None] / 255
        return ((pixels - mean) / std).to(like)

    def to_input(self, x: float, y: float) -> tuple[float, float]:
        """A pixel of the photograph as one of the model's input."""
        left, top, right, bottom = self.box
        if not (left <= x < right and top <= y < bottom):
            seen = f"x from {left:g} to {right:g} and y from {top:g} to {bottom:g}"
            raise LinvitError(f"{x:g},{y:g} is outside of what the model sees of {self.name}: {seen}")
        return (x - left) / (right - left) * self.picture.width, (y - top) / (bottom - top) * self.picture.height


def read_photograph(path: Path) -> Image.Image:
    """The photograph in a file, turned as its EXIF says."""
    if not path.exists():
        raise LinvitError(f"there is no image {path}")
    if path.is_dir():
        raise LinvitError(f"{path} is a folder: give image files")
    check_file(path)
    with path.open("rb") as file:
        return decoded(file, str(path))


def decoded(file: BinaryIO | bytes, name: str) -> Image.Image:
    """A photograph from a file that is open or was sent; one that cannot be read is one line with this name."""
    with naming(name):
        picture = upright(open_image(file))
        picture.load()
        return eight_bits(picture).convert("RGB")


def view(photograph: Image.Image, name: str, size: tuple[int, int]) -> View:
    """The middle of a photograph, with the shape of this height and width and brought to it."""
    height, width = size
    scale = min(photograph.width / width, photograph.height / height)
    wide, high = scale * width, scale * height
    left, top = (photograph.width - wide) / 2, (photograph.height - high) / 2
    box = (left, top, left + wide, top + high)
    return View(name, photograph.resize((width, height), Image.Resampling.BICUBIC, box=box), box)


def input_size(model: nn.Module, size: tuple[int, int] | None) -> tuple[int, int]:
    """The size asked for, or the model's own."""
    height, width = size or own_size(model)
    return int(height), int(width)
