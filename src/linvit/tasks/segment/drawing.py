"""What a segmenter sees, drawn on the image."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from linvit.errors import LinvitError
from linvit.figures.classes import Chips, as_picture, class_colour, paint, text_size


def draw_segmentation(image: Tensor | Image.Image, labels: Tensor, names: Sequence[str]) -> Image.Image:
    """A picture with a veil over each class, and under it the names of those that are there, the largest first. What is
    `background`, or has no class as 255 has none, is left as it is."""
    picture, seen = as_picture(image), labels.cpu().numpy()
    if seen.shape != (picture.height, picture.width):
        raise LinvitError(
            f"labels of {seen.shape} do not fit an image of {(picture.height, picture.width)}: resize one"
        )
    counts = np.bincount(seen.clip(0, len(names)).flatten(), minlength=len(names))[: len(names)]
    largest = np.argsort(-counts, kind="stable").tolist()
    present = [label for label in largest if counts[label] and names[label] != "background"]
    size = text_size(picture)
    for label in present:
        picture = paint(picture, seen == label, class_colour(label), 0.5, max(1, size // 12))
    return with_legend(picture, [(names[label], label) for label in present], size)


def with_legend(picture: Image.Image, entries: Sequence[tuple[str, int]], size: int) -> Image.Image:
    """The picture on a white sheet, with rows of names below it."""
    chips = Chips(size)
    gap = chips.pad
    places: list[tuple[float, float]] = []
    left, top = float(gap), float(picture.height + gap)
    for name, _ in entries:
        if left > gap and left + chips.width(name) + gap > picture.width:
            left, top = gap, top + chips.height + gap
        places.append((left, top))
        left += chips.width(name) + gap
    height = round(top) + chips.height + gap if entries else picture.height
    sheet = Image.new("RGB", (picture.width, height), "white")
    sheet.paste(picture)
    draw = ImageDraw.Draw(sheet)
    for (left, top), (name, label) in zip(places, entries, strict=True):
        chips.draw(draw, left, top, name, class_colour(label))
    return sheet
