"""Annotated images by index: what every format is read into.

Annotations are kept in a few flat arrays, not in an object each: worker processes that share them would copy every
object that they look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.models.dense import IGNORED
from linvit.tasks.classify.readers import more
from linvit.tasks.dense.files import Files
from linvit.tasks.dense.pixels import Size, draw_all, read_image, read_indices


@dataclass
class Sample:
    """An image, uint8 `(3, height, width)`, and what is on it.

    For segmentation `labels` are `(height, width)`, with 255 for pixels that are not judged. For detection there are
    n objects: `labels` `(n,)`, `boxes` `(n, 4)` as left, top, right, bottom in pixels, `areas` in square pixels by
    which COCO tells small from large, `iscrowd` for what stands for many objects, `difficult` for what VOC does not
    judge, and, where they were asked for, `masks` `(n, height, width)` of 0 and 1."""

    image: Tensor
    image_id: int
    labels: Tensor
    boxes: Tensor | None = None
    iscrowd: Tensor | None = None
    difficult: Tensor | None = None
    areas: Tensor | None = None
    masks: Tensor | None = None


class Row(NamedTuple):
    """An image of a set: its file, its size where that is known, its mask's file, its objects from first to last."""

    image: str
    id: int
    size: Size | None = None
    mask: str = ""
    first: int = 0
    last: int = 0


@dataclass(eq=False)
class Samples:
    """One split of a set: `read(index)` gives a `Sample`. Labels count `categories` from 0."""

    name: str
    categories: tuple[str, ...]
    files: Files
    rows: Sequence[Row]
    note: str = ""  # what a user should know of this split

    task = ""
    labelled = True

    def __post_init__(self) -> None:
        if not self.rows:
            raise LinvitError(f"{self.name} has no image: put some in, or take the split away")
        twice = [name for place, name in enumerate(self.categories) if name in self.categories[:place]]
        if twice:
            raise LinvitError(f"{self.name} has two categories called '{twice[0]}': rename one")

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Sample:
        """An image with what is on it; what is wrong with it is an error that names the file."""
        raise NotImplementedError

    def filename(self, index: int) -> str:
        return self.files.full(self.rows[index].image)

    def relabelled(self, categories: tuple[str, ...], places: list[int]) -> "Samples":
        """The same images for other categories; label i becomes `places[i]`."""
        raise NotImplementedError


@dataclass(eq=False)
class Objects:
    """The objects of all images, one image's after the other's."""

    boxes: np.ndarray
    labels: np.ndarray
    iscrowd: np.ndarray
    difficult: np.ndarray
    areas: np.ndarray
    shapes: Sequence[Any] = ()  # COCO's polygons or RLE, pickled, or an object's number in the image's mask file


@dataclass(eq=False)
class DetectSamples(Samples):
    """Images with boxes, and with masks where the set was opened `with_masks`."""

    objects: Objects = field(kw_only=True)
    with_masks: bool = False

    task = "detect"

    def read(self, index: int) -> Sample:
        row, objects = self.rows[index], self.objects
        assert row.size is not None
        image = read_image(self.files, row.image, row.size, "its annotation")
        chosen = slice(row.first, row.last)
        parts = (objects.labels, objects.boxes, objects.iscrowd, objects.difficult, objects.areas)
        found = Sample(image, row.id, *(torch.from_numpy(part[chosen].copy()) for part in parts))
        if self.with_masks:
            found.masks = self.masks(row, (image.shape[1], image.shape[2]))
        return found

    def masks(self, row: Row, size: Size) -> Tensor:
        shapes = list(self.objects.shapes[row.first : row.last])
        if not row.mask:
            return draw_all(shapes, size, self.files.full(row.image))
        numbers = torch.from_numpy(read_indices(self.files, row.mask, size))
        return (numbers == torch.tensor(shapes, dtype=torch.int32)[:, None, None]).byte()

    def relabelled(self, categories: tuple[str, ...], places: list[int]) -> "DetectSamples":
        labels = np.asarray(places, dtype=np.int64)[self.objects.labels]
        return replace(self, categories=categories, objects=replace(self.objects, labels=labels))


@dataclass(eq=False)
class SegmentSamples(Samples):
    """Images with a map of labels each. `labels` says for each number in a mask file which label it is: a category,
    255 for what is not judged, or -1 for what should not be there."""

    labels: np.ndarray = field(kw_only=True)

    task = "segment"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.categories) > IGNORED:
            count = len(self.categories)
            raise LinvitError(f"{self.name} has {count} categories: {IGNORED} are the most, since that is 'not judged'")

    def read(self, index: int) -> Sample:
        row = self.rows[index]
        numbers = read_indices(self.files, row.mask)
        image = read_image(self.files, row.image, (numbers.shape[0], numbers.shape[1]), self.files.full(row.mask))
        labels = self.labels[np.clip(numbers, 0, len(self.labels) - 1)]
        odd = labels < 0
        if odd.any():
            hint = f"give numbers of its {len(self.categories)} categories, and {IGNORED} for what is not judged"
            raise LinvitError(f"mask {self.files.full(row.mask)} has a pixel of {numbers[odd].max()}: {hint}")
        return Sample(image, row.id, torch.from_numpy(labels.astype(np.int64)))

    def relabelled(self, categories: tuple[str, ...], places: list[int]) -> "SegmentSamples":
        known = (self.labels >= 0) & (self.labels != IGNORED)
        labels = self.labels.copy()
        labels[known] = np.asarray(places)[self.labels[known]]
        return replace(self, categories=categories, labels=labels)


def labels_of(numbers: Sequence[int], *, ignored: Sequence[int] = (IGNORED,)) -> np.ndarray:
    """For each number that a mask file can have its label: the place in `numbers`. The last entry, -1, is for what is
    larger than all that are known."""
    table = np.full(max((*numbers, *ignored, IGNORED)) + 2, -1, dtype=np.int64)
    table[list(ignored)] = IGNORED
    table[list(numbers)] = np.arange(len(numbers))
    return table


def match_categories(samples: Samples, names: Sequence[str]) -> Samples:
    """The samples labelled by where their categories stand among the names of a model's outputs, of which there may be
    more. A category that the model does not know is an error, as in classification: judged without it, the model
    would look better than it is."""
    if tuple(names) == samples.categories:
        return samples
    places = {name: place for place, name in enumerate(names)}
    odd = [name for name in samples.categories if name not in places]
    if odd:
        hint = "leave out what it does not know, or take a model of these categories"
        raise LinvitError(f"{samples.name} has category '{odd[0]}'{more(odd)}, which the model does not know: {hint}")
    return samples.relabelled(tuple(names), [places[name] for name in samples.categories])


class Collector:
    """Gathers the objects of a set, image by image, clips their boxes and counts what cannot be used."""

    def __init__(self, with_masks: bool) -> None:
        self.with_masks = with_masks
        self.boxes: list[tuple[float, ...]] = []
        self.facts: list[tuple[int, bool, bool, float]] = []
        self.shapes: list[Any] = []
        self.outside = self.shapeless = 0

    def add(
        self,
        box: tuple[float, float, float, float],
        size: Size,
        label: int,
        *,
        iscrowd: bool = False,
        difficult: bool = False,
        area: float | None = None,
        shape: Any = None,
    ) -> None:
        """An object by its left, top, right and bottom on an image of a size. One of which nothing is left on the image
        is left out, and one without a shape where masks are wanted."""
        left, right = (min(max(side, 0.0), float(size[1])) for side in box[0::2])
        top, bottom = (min(max(side, 0.0), float(size[0])) for side in box[1::2])
        if not (right > left and bottom > top):
            self.outside += 1
        elif self.with_masks and not shape:
            self.shapeless += 1
        else:
            self.boxes.append((left, top, right, bottom))
            self.facts.append((label, iscrowd, difficult, (right - left) * (bottom - top) if area is None else area))
            if self.with_masks:
                self.shapes.append(shape)

    def __len__(self) -> int:
        return len(self.boxes)

    def samples(self, name: str, categories: tuple[str, ...], files: Files, rows: Sequence[Row]) -> DetectSamples:
        """The split whose objects these are."""
        boxes = np.array(self.boxes, dtype=np.float32).reshape(-1, 4)
        labels, areas = (np.array([row[column] for row in self.facts]) for column in (0, 3))
        iscrowd, difficult = (np.array([row[column] for row in self.facts], dtype=bool) for column in (1, 2))
        objects = Objects(
            boxes, labels.astype(np.int64), iscrowd, difficult, areas.astype(np.float32), shapes=self.shapes
        )
        return DetectSamples(name, categories, files, rows, self.note(name), self.with_masks, objects=objects)

    def note(self, name: str) -> str:
        """What was left out, and whether that leaves anything to learn."""
        why = {"outside their image or of no area": self.outside, "without a mask": self.shapeless}
        parts = [f"{count:,} {'box' if count == 1 else 'boxes'} {what}" for what, count in why.items() if count]
        told = [f"left out {' and '.join(parts)}"] if parts else []
        told += [] if self.boxes else ["no object is left on any image" if parts else "no object is on any image"]
        return f"{name}: {'; '.join(told)}" if told else ""
