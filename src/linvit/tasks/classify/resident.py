"""A set that lives on the device: decoded once to uint8, drawn, cropped and varied there.

Nothing is decoded, copied or waited for during an epoch, so small sets train as fast as the model can. Pictures are
kept as squares of one size, the largest square in the middle of each; crops are taken from that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.data.transforms import str_to_pil_interp
from torch import Tensor

from linvit.errors import LinvitError
from linvit.tasks.classify.augmenting import Augmenter, Draws, check_batch, normalise, send
from linvit.tasks.classify.data import Images, Stream
from linvit.tasks.classify.order import Order
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.training.engine.capture import Replayed

ROOM = 0.6  # share of the device's free memory that a set may take; the model needs some as well
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@contextmanager
def quiet(what: str, total: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


class Pixels:
    """The decoded set: uint8 pictures `(images, channels, height, width)` and labels, on the device."""

    def __init__(self, name: str, pictures: Tensor, labels: Tensor) -> None:
        self.name, self.pictures, self.labels = name, pictures, labels

    def __len__(self) -> int:
        return len(self.labels)


Held = dict[tuple[str, str], Pixels]  # sets that stay on a device, by what they were made from and the device


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
    """Decode a set and put it on the device. For training, pictures are stored as squares of `stored` pixels (the
    model's size unless said otherwise; crops are not smoothed when they shrink, so not much more); for evaluation as
    timm's transform leaves them. With a `cache` folder the decoded set is kept there as one file and found again; with
    `held` it stays on the device for the next call."""
    if isinstance(images, Stream):
        raise LinvitError(f"{images.name} can only be read in order: it cannot be kept on the device")
    height, width = (stored, stored) if training and stored else preprocessing.size
    shape = (len(images), len(preprocessing.mean), height, width)
    identity = fingerprint(images, preprocessing, training, shape)
    if held is not None and (identity, str(device)) in held:
        return held[identity, str(device)]
    check_room(images.name, int(np.prod(shape)), torch.device(device))
    file = cache / f"{identity[:16]}.safetensors" if cache else None
    kept = read_cache(file, identity) if file else None
    if kept is None:
        kept = decode_all(images, preprocessing, training, shape, progress)
        if file:
            write_cache(file, identity, *kept)
    images.check_labels(kept[1].numpy())
    pixels = Pixels(images.name, kept[0].to(device), kept[1].to(device))
    if held is not None:
        held[identity, str(device)] = pixels
    return pixels


def check_room(name: str, size: int, device: torch.device) -> None:
    """Whether so many bytes fit on the device beside a model."""
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    if size > ROOM * free:
        raise LinvitError(
            f"{name} takes {size / 2**30:.1f} GiB decoded, too much for {free / 2**30:.1f} GiB of free device memory: "
            "train without the resident loader"
        )


def decode_all(
    images: Images, preprocessing: Preprocessing, training: bool, shape: tuple[int, ...], progress: Progress
) -> tuple[Tensor, Tensor]:
    """All pictures and labels, decoded by threads: Pillow lets others work while it decodes."""
    pictures = torch.empty(shape, dtype=torch.uint8)
    labels = torch.empty(shape[0], dtype=torch.long)
    evaluate = preprocessing.evaluation()
    resampling = str_to_pil_interp("bicubic" if preprocessing.interpolation == "bicubic" else "bilinear")

    def one(index: int) -> None:
        picture, labels[index] = images[index]
        picture = picture.convert(preprocessing.mode)
        pictures[index] = channels_first(square(picture, shape[-2:], resampling)) if training else evaluate(picture)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, progress(f"decoding {images.name}", shape[0]) as advance:
        for _ in pool.map(one, range(shape[0])):
            advance()
    return pictures, labels


def channels_first(picture: Image.Image) -> Tensor:
    values = torch.from_numpy(np.array(picture))
    return values.permute(2, 0, 1) if values.ndim == 3 else values[None]


def square(picture: Image.Image, size: tuple[int, ...], resampling: Any) -> Image.Image:
    """The largest part in the middle with the stored shape's ratio, resized; untouched where it fits already."""
    height, width = size
    if picture.size == (width, height):
        return picture
    scale = min(picture.width / width, picture.height / height)
    wide, tall = scale * width, scale * height
    left, top = (picture.width - wide) / 2, (picture.height - tall) / 2
    return picture.resize((width, height), resampling, box=(left, top, left + wide, top + tall))


def fingerprint(images: Images, preprocessing: Preprocessing, training: bool, shape: tuple[int, ...]) -> str:
    """What a cached file was made from: the files by name and size where there are files, and how they were decoded."""
    digest = hashlib.sha256(repr((images.name, preprocessing, training, shape, images.classes)).encode())
    if images.labels is not None:
        digest.update(images.labels.tobytes())
    places = getattr(images.source, "places", None)  # in an archive
    for index in range(len(images)) if images.filenames is not None else ():
        name = images.filename(index)
        digest.update(f"{name} {places[index] if places else os.path.getsize(name)}\n".encode())
    return digest.hexdigest()


def read_cache(file: Path, identity: str) -> tuple[Tensor, Tensor] | None:
    """The cached set; none where there is none or it was made from something else."""
    try:
        with safe_open(str(file), framework="pt") as kept:
            if (kept.metadata() or {}).get("identity") != identity:
                return None
            return kept.get_tensor("pictures"), kept.get_tensor("labels")
    except (OSError, SafetensorError):
        return None


def write_cache(file: Path, identity: str, pictures: Tensor, labels: Tensor) -> None:
    """Write under another name first: a broken file never has the right one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    save_file({"pictures": pictures, "labels": labels}, part, {"identity": identity})
    os.replace(part, file)


@lru_cache(maxsize=8)
def make_augmenter(
    augmentation: Augmentation, preprocessing: Preprocessing, classes: int, device: torch.device, compile: bool
) -> tuple[Augmenter, Callable[[Tensor, Tensor, Draws], tuple[Tensor, Tensor]]]:
    """The augmenter and how to call it. Every step draws its numbers from a seed of its own, so runs can share it:
    what the first compiled or recorded, the others find. Only RandAugment is worth compiling, which passes over the
    pictures some hundred times."""
    augmenter = Augmenter(augmentation, preprocessing, classes, device=device)
    call: Callable[..., tuple[Tensor, Tensor]] = augmenter
    if compile and augmentation.randaugment:
        call = torch.compile(augmenter, dynamic=False)
    if device.type != "cuda":
        return augmenter, call
    recorded = Replayed(lambda images, labels, *draws: call(images, labels, Draws(*draws)))
    return augmenter, lambda images, labels, draws: cast(tuple[Tensor, Tensor], recorded(images, labels, *draws))


class Resident:
    """A BatchSource over pixels on the device. Without an augmentation it is for evaluation."""

    def __init__(
        self,
        pixels: Pixels,
        preprocessing: Preprocessing,
        batch_size: int,
        classes: int,
        *,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        compile: bool = False,
    ) -> None:
        check_batch(batch_size, augmentation)
        self.pixels, self.preprocessing = pixels, preprocessing
        self.device = pixels.pictures.device
        self.order = Order(len(pixels), batch_size, seed, rank, world, augmentation is not None, repeats)
        self.batches, self.images = self.order.batches, self.order.images
        self.augmenter: Augmenter | None = None
        if augmentation is not None:
            self.augmenter, self.augment = make_augmenter(augmentation, preprocessing, classes, self.device, compile)
        self.mean = 255 * torch.tensor(preprocessing.mean, device=self.device)
        self.std = 255 * torch.tensor(preprocessing.std, device=self.device)
        high = int(pixels.labels.max())
        if high >= classes:
            raise LinvitError(f"{pixels.name} has label {high}, the model {classes} outputs")

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order
        places = send(torch.cat(order.epoch(epoch)), self.device).split(order.batch)
        table = self.augmenter.table(order.batches, order.seed, epoch, mixed) if self.augmenter else None
        for step in range(skip, order.batches):
            pictures, labels = self.pixels.pictures[places[step]], self.pixels.labels[places[step]]
            if self.augmenter is None or table is None:
                yield normalise(pictures, self.mean, self.std), labels
                continue
            draws = self.augmenter.draw(len(labels), order.rank, order.world, order.seed, epoch, step, table[step])
            yield self.augment(pictures, labels, draws)
