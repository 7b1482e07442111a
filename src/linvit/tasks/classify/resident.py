"""A set that lives on the device: decoded once to uint8, drawn, cropped and varied there.

Nothing is decoded, copied or waited for during an epoch, so small sets train as fast as the model can. All pictures are
kept at one size. One of another shape is squeezed to it, and its shape is noted: crops are drawn in that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linvit.errors import LinvitError
from linvit.files import temporary
from linvit.tasks.classify.augmenting import send
from linvit.tasks.classify.batches import Batches, Pictures
from linvit.tasks.classify.cutting import PILLOW, channels_first
from linvit.tasks.classify.data import Images, Stream
from linvit.tasks.classify.geometry import frames_of
from linvit.tasks.classify.preprocessing import Preprocessing

MEMORY_SHARE = 0.6  # share of the device's free memory that a set may take; the model needs some as well
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@contextmanager
def quiet(what: str, total: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


class Pixels:
    """The decoded set on the device: uint8 pictures `(images, channels, height, width)`, labels, and the frames that
    crops are drawn in, `(images, 2)`, unless all have the stored size."""

    def __init__(self, name: str, pictures: Tensor, labels: Tensor, frames: Tensor | None = None) -> None:
        self.name, self.pictures, self.labels = name, pictures, labels
        self.stored = torch.tensor(pictures.shape[-2:], device=pictures.device)
        squeezed = frames is not None and bool((frames != frames.new_tensor(pictures.shape[-2:])).any())
        self.frames = frames if squeezed else None

    def __len__(self) -> int:
        return len(self.labels)


Held = dict[tuple[str, str], Pixels]  # sets that stay on a device, by cache key and device


def decode(
    images: Images | Stream,
    preprocessing: Preprocessing,
    *,
    device: str | torch.device = "cpu",
    training: bool = True,
    stored: int | None = None,
    cache: Path | None = None,
    progress: Progress = quiet,
    held: Held | None = None,
) -> Pixels:
    """Decode a set and put it on the device. For training, pictures are stored at `stored` × `stored` pixels (the
    model's size unless said otherwise; crops are not smoothed when they shrink, so not much more); for evaluation as
    timm's transform leaves them. With a `cache` folder the decoded set is kept there as one file and found again; with
    `held` it stays on the device for the next call."""
    if isinstance(images, Stream):
        raise LinvitError(f"{images.name} can only be read in order: it cannot be kept on the device")
    height, width = (stored, stored) if training and stored else preprocessing.size
    shape = (len(images), len(preprocessing.mean), height, width)
    key = cache_key(images, preprocessing, training, shape)
    if held is not None and (key, str(device)) in held:
        return held[key, str(device)]
    check_room(images.name, int(np.prod(shape)), torch.device(device))
    file = cache / f"{key[:16]}.safetensors" if cache else None
    found = read_cache(file, key) if file else None
    if found is None:
        found = decode_all(images, preprocessing, training, shape, progress)
        if file:
            with temporary(file) as beside:
                save_file(found, beside, {"key": key})
    images.check_labels(found["labels"].numpy())
    pixels = Pixels(images.name, *(found[name].to(device) for name in ("pictures", "labels", "frames")))
    if held is not None:
        held[key, str(device)] = pixels
    return pixels


def check_room(name: str, size: int, device: torch.device) -> None:
    """Whether so many bytes fit on the device beside a model."""
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    if size > MEMORY_SHARE * free:
        raise LinvitError(
            f"{name} takes {size / 2**30:.1f} GiB decoded, too much for {free / 2**30:.1f} GiB of free device memory: "
            "train without the resident loader"
        )


def decode_all(
    images: Images, preprocessing: Preprocessing, training: bool, shape: tuple[int, int, int, int], progress: Progress
) -> dict[str, Tensor]:
    """All pictures, labels and frames, decoded by threads: Pillow lets others work while it decodes."""
    count, *_, height, width = shape
    pictures = torch.empty(shape, dtype=torch.uint8)
    labels = torch.empty(count, dtype=torch.long)
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

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, progress(f"decoding {images.name}", count) as advance:
        for _ in pool.map(one, range(count)):
            advance()
    return {"pictures": pictures, "labels": labels, "frames": frames_of(shapes, (height, width))}


def cache_key(images: Images, preprocessing: Preprocessing, training: bool, shape: tuple[int, ...]) -> str:
    """What a set was decoded from: the files by name and size where there are files, and how they were decoded."""
    made_from = ("whole pictures", images.name, preprocessing, training, shape, images.classes)
    digest = hashlib.sha256(repr(made_from).encode())
    if images.labels is not None:
        digest.update(images.labels.tobytes())
    places = getattr(images.source, "places", None)  # in an archive
    for index in range(len(images)) if images.filenames is not None else ():
        name = images.filename(index)
        digest.update(f"{name} {places[index] if places else os.path.getsize(name)}\n".encode())
    return digest.hexdigest()


def read_cache(file: Path, key: str) -> dict[str, Tensor] | None:
    """The cached set; none where there is none or it was made from something else."""
    try:
        with safe_open(str(file), framework="pt") as kept:
            if kept.metadata() != {"key": key}:
                return None
            return {name: kept.get_tensor(name) for name in ("pictures", "labels", "frames")}
    except (OSError, SafetensorError):
        return None


class Resident(Batches):
    """A BatchSource over pixels on the device; the options are those of `Batches`."""

    def __init__(
        self, pixels: Pixels, preprocessing: Preprocessing, batch_size: int, classes: int, **options: Any
    ) -> None:
        device = pixels.pictures.device
        super().__init__(pixels.name, len(pixels), preprocessing, batch_size, classes, device, **options)
        self.pixels = pixels
        self.check_labels(pixels.labels)

    def pictures(self, epoch: int, skip: int) -> Iterator[Pictures]:
        pixels, order = self.pixels, self.order
        places = send(torch.cat(order.epoch(epoch)), self.device).split(order.batch)
        for step in range(skip, order.batches):
            chosen = places[step]
            yield pixels.pictures[chosen], pixels.labels[chosen], self.boxes(epoch, step, chosen)

    def boxes(self, epoch: int, step: int, chosen: Tensor) -> Tensor | None:
        """Crops of pictures that have been squeezed; of others they are drawn later, with everything else."""
        if self.augmentation is None or self.pixels.frames is None:
            return None
        frames = self.pixels.frames[chosen]
        boxes = self.augmentation.draw_boxes(self.crop_numbers(epoch, step), frames, self.preprocessing.size)
        return torch.stack(boxes.scaled(self.pixels.stored / frames), dim=1)
