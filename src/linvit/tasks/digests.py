"""What tells one set of images from another of the same name: labels, names and sizes of files, never their content."""

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from linvit.tasks.classify.data import Digits, Images
from linvit.tasks.dense.samples import DetectSamples, Samples, SegmentSamples

SIZED = 10_000  # so many images' file sizes go into a set's digest; the names of all do


def split_digest(split: Any) -> str | None:
    """The digest of a split; None for a stream, of which nobody knows before it was read."""
    if isinstance(split, Samples):
        return samples_digest(split)
    return images_digest(split) if isinstance(split, Images) else None


def images_digest(split: Images) -> str:
    """The pixels of the digits; of others names, labels and file sizes."""
    source, labels = split.source, split.labels
    found = hashlib.sha256(f"{len(split)} {list(split.classes)}".encode())
    if labels is not None:
        found.update(np.asarray(labels, dtype="<i8").tobytes())
    if isinstance(source, Digits):
        found.update(source.pixels.tobytes())
    elif hasattr(source, "samples"):
        names = [source.filename(i) for i in range(len(source))]
        found.update("\n".join(names).encode(errors="surrogateescape"))
        places = getattr(source, "places", None)  # in an archive, with their sizes
        every = range(0, len(names), max(1, len(names) // SIZED))
        sizes = (size_of(split.filename(i)) if places is None else places[i][1] for i in every)
        found.update(" ".join(map(str, sizes)).encode())
    return found.hexdigest()[:16]


def size_of(file: str) -> int | None:
    """How many bytes a file has; None for a link to nothing, which is told when it is read."""
    path = Path(file)
    return path.stat().st_size if path.exists() else None


def samples_digest(samples: Samples) -> str:
    """Categories, names, boxes and labels, and sizes of files."""
    found = hashlib.sha256(f"{samples.task} {len(samples)} {list(samples.categories)}".encode())
    for row in samples.rows:
        text = f"{PurePosixPath(row.image).name} {row.id} {row.first} {row.last}\n"
        found.update(text.encode(errors="surrogateescape"))
    found.update(" ".join(map(str, file_sizes(samples))).encode())
    if isinstance(samples, DetectSamples):
        objects = samples.objects
        for column in (objects.boxes, objects.labels, objects.iscrowd, objects.difficult):
            found.update(column.tobytes())
    elif isinstance(samples, SegmentSamples):
        found.update(samples.labels.astype("<i8").tobytes())
    return found.hexdigest()[:16]


def file_sizes(samples: Samples) -> Iterator[int]:
    """Of images and their masks, of at most so many as count for a digest."""
    for row in samples.rows[:: max(1, len(samples) // SIZED)]:
        yield from (samples.files.size(name) for name in (row.image, row.mask) if name)
