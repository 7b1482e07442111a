"""A set that lives on the device: decoded once to uint8, drawn, cropped and varied there.

Nothing is decoded, copied or waited for during an epoch, so small sets train as fast as the model can. All pictures are
kept at one size. One of another shape is squeezed to it, and its shape is noted: crops are drawn in that.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.images import Progress, quiet, read_all
from linvit.tasks.classify.augmenting import send
from linvit.tasks.classify.batches import Batches, Pictures
from linvit.tasks.classify.data import Images, Split, Stream
from linvit.tasks.classify.decoding import PILLOW, channels_first
from linvit.tasks.classify.preprocessing import Preprocessing, frames_of
from linvit.tasks.classify.readers import FileReader

MEMORY_SHARE = 0.6  # share of the device's free memory that a set may take; the model needs some as well


class Pixels:
    """The decoded set on the device: uint8 pictures `(images, channels, height, width)`, labels, and the frames that
    crops are drawn in, `(images, 2)`, unless all have the stored size."""

    def __init__(self, name: str, pictures: Tensor, labels: Tensor, frames: Tensor | None = None) -> None:
        self.name, self.pictures, self.labels = name, pictures, labels
        self.stored = torch.tensor(pictures.shape[-2:], device=pictures.device)
        self.frames = frames if frames is not None and bool((frames != self.stored).any()) else None


Held = dict[tuple[str, str], Pixels]  # sets that stay on a device, by cache key and device


def decode(
    images: Split,
    preprocessing: Preprocessing,
    *,
    device: str | torch.device = "cpu",
    training: bool = True,
    progress: Progress = quiet,
    held: Held | None = None,
) -> Pixels:
    """Decode a set and put it on the device: for training at the model's size, for evaluation as timm's transform
    leaves it. With `held` it stays on the device for the next call."""
    if isinstance(images, Stream):
        raise LinvitError(f"{images.name} can only be read in order: it cannot be kept on the device")
    shape = (len(images), len(preprocessing.mean), *preprocessing.size)
    key = (cache_key(images, preprocessing, training, shape), str(device))
    held = {} if held is None else held
    if key in held:
        return held[key]
    check_room(images.name, math.prod(shape), torch.device(device))
    count, _, height, width = shape
    pictures, labels = torch.empty(shape, dtype=torch.uint8), torch.empty(count, dtype=torch.long)
    shapes = torch.empty(count, 2)
    evaluate = preprocessing.evaluation()
    resampling = PILLOW["bicubic" if preprocessing.interpolation == "bicubic" else "bilinear"]

    def one(index: int) -> None:
        picture, labels[index] = images[index]
        picture = picture.convert(preprocessing.mode)
        shapes[index] = torch.tensor((picture.height, picture.width))
        if training and picture.size != (width, height):
            picture = picture.resize((width, height), resampling)
        pictures[index] = channels_first(picture) if training else evaluate(picture)

    read_all(one, range(count), f"decoding {images.name}", progress)
    images.check_labels(labels.numpy())
    frames = frames_of(shapes, (height, width))
    held[key] = Pixels(images.name, pictures.to(device), labels.to(device), frames.to(device))
    return held[key]


def check_room(name: str, size: int, device: torch.device) -> None:
    """Whether so many bytes fit on the device beside a model."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
    if size > MEMORY_SHARE * free:
        much = f"{name} takes {size / 2**30:.1f} GiB decoded, too much for {free / 2**30:.1f} GiB of free device memory"
        raise LinvitError(f"{much}: train without the resident loader")


def cache_key(images: Images, preprocessing: Preprocessing, training: bool, shape: tuple[int, ...]) -> str:
    """What a set was decoded from: the files by name and size where there are files, and how they were decoded."""
    made_from = ("whole pictures", images.name, preprocessing, training, shape, images.classes)
    digest = hashlib.sha256(repr(made_from).encode())
    if images.labels is not None:
        digest.update(images.labels.tobytes())
    places = getattr(images.source, "places", None)  # in an archive
    for index in range(len(images)) if isinstance(images.source, FileReader) else ():
        name = images.filename(index)
        size = places[index] if places else os.path.getsize(name) if os.path.exists(name) else None
        digest.update(f"{name} {size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


class Resident(Batches):
    """A BatchSource over pixels on the device; the options are those of `Batches`."""

    def __init__(
        self, pixels: Pixels, preprocessing: Preprocessing, batch_size: int, classes: int, **options: Any
    ) -> None:
        device, count = pixels.pictures.device, len(pixels.labels)
        super().__init__(pixels.name, count, preprocessing, batch_size, classes, device, **options)
        self.pixels = pixels
        self.check_labels(pixels.labels)

    def pictures(self, epoch: int, skip: int) -> Iterator[Pictures]:
        pixels, order = self.pixels, self.order
        places = send(torch.cat(order.epoch(epoch)), self.device).split(order.batch)
        for step, chosen in enumerate(places[skip:], start=skip):
            boxes: list[Tensor] = []
            if self.augmenter is not None and pixels.frames is not None:  # some were squeezed; else drawn later
                frames, (u, _) = pixels.frames[chosen], self.augmenter.uniform(order, epoch, step)
                drawn = self.augmenter.augmentation.draw_boxes(u, frames, self.preprocessing.size)
                boxes = [drawn * (pixels.stored / frames).repeat(1, 2)]
            yield pixels.pictures[chosen], pixels.labels[chosen], *boxes
