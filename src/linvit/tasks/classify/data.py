"""Labelled images by name: the built-in digits, an image folder, an archive of one, and timm's named sets.

    open_images("digits", "train")
    open_images("imagenette128.tar", "validation")
    open_images("torch/cifar10", "train", root="cifar", download=True)

Whatever the source, what comes out is `Images`: pictures by index, with their classes known and checked. Who can do
without labels, because a teacher has the answers, says so: `open_images("photos", "train", unlabelled=True)`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from PIL import Image
from timm.data import create_dataset
from timm.data.dataset import IterableImageDataset
from torch.utils.data import Dataset

from linvit.errors import LinvitError, reason, unknown
from linvit.images import eight_bits, naming, open_image, upright
from linvit.tasks.classify.readers import SPLITS, FileReader, more, open_reader

PREFIXES = {"torch": "torchvision", "hfds": "datasets", "hfids": "datasets", "tfds": "tensorflow_datasets"}
PREFIXES |= {"wds": "webdataset"}  # the package that each kind of set needs
STREAMS = ("wds", "tfds", "hfids")
ROOTED = ("torch", "wds")  # kinds of sets that have no place of their own
HELD_OUT = 10  # of so many images of a class one is for validation, where a set has no splits


@dataclass(eq=False)
class Images(Dataset):
    """One split: pictures and labels by index.

    `source` gives `(picture or file, label)` by index. `classes` are the names where the set has them; `labels` all
    labels where they are known without decoding. Where it is not `labelled` every label is 0 and means nothing.
    """

    name: str
    source: Any
    classes: Sequence[str] = ()
    labels: Any = None
    labelled: bool = True
    note: str = ""  # what a user should know of this split
    held_out_of: int = 0  # how many images the set has, if it has no splits and this is what is held out
    outputs: list[int] | None = None  # for each label of the source ours, where they differ

    def __post_init__(self) -> None:
        self.classes = tuple(self.classes)
        if self.labels is not None:
            self.labels = np.asarray(self.labels, dtype=np.int64)
            self.check_labels(self.labels)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """The decoded picture and its label; an unreadable one is an error that names its file."""
        with self.naming(index):
            picture, label = self.open(index)
            picture.load()
            return eight_bits(picture), label

    def open(self, index: int) -> tuple[Image.Image, int]:
        """The picture, of which only the header may have been read, and its label."""
        with self.naming(index):
            picture, label = self.source[index][:2]
            if not isinstance(picture, Image.Image):
                picture = upright(open_image(picture))
        if self.outputs is None:
            return picture, int(label)
        if not 0 <= label < len(self.outputs):
            raise LinvitError(f"{self.name} has label {label}: labels must run from 0 to {len(self.outputs) - 1}")
        return picture, self.outputs[int(label)]

    def naming(self, index: int) -> AbstractContextManager[None]:
        """What goes wrong with a picture inside names its file."""
        return naming(self.filename(index))

    def renumbered(self, names: Sequence[str]) -> "Images":
        """The same images, labelled by where their classes stand among the names of a model's outputs."""
        if tuple(names) == self.classes:
            return self
        places = {name: place for place, name in enumerate(names)}
        odd = [name for name in self.classes if name not in places]
        if odd:
            hint = "leave out what it does not know, or take a model of these classes"
            raise LinvitError(f"{self.name} has class '{odd[0]}'{more(odd)}, which the model does not know: {hint}")
        outputs = [places[name] for name in self.classes]
        labels = None if self.labels is None else np.asarray(outputs, dtype=np.int64)[self.labels]
        return replace(self, classes=names, outputs=outputs, labels=labels)

    def filename(self, index: int) -> str:
        known = isinstance(self.source, FileReader)
        return self.source.filename(index, absolute=True) if known else f"{index} of {self.name}"

    @property
    def class_count(self) -> int | None:
        """How many classes there are, where the set says so."""
        if self.classes:
            return len(self.classes)
        return None if self.labels is None or not self.labelled else int(self.labels.max()) + 1

    def check_labels(self, labels: np.ndarray) -> None:
        """Labels count from 0 to the number of classes; anything else would index past the model's outputs."""
        low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, -1)
        if low < 0 or (self.classes and high >= len(self.classes)):
            outside = low if low < 0 else high
            most = f"0 to {len(self.classes) - 1}" if self.classes else "0 upwards"
            raise LinvitError(f"{self.name} has label {outside}: labels must run from {most}")


class Stream:
    """A split that can only be read in order (WebDataset and the like): timm's iterable dataset, opened per pass."""

    classes: tuple[str, ...] = ()
    class_count: int | None = None
    labelled, note, held_out_of = True, "", 0

    def __init__(self, name: str, split: str, root: str | None, options: dict[str, Any]) -> None:
        self.name, self.split, self.root, self.options = name, split, root, options

    def open(self, *, training: bool, batch_size: int = 1, seed: int = 0) -> IterableImageDataset:
        passes = {"is_training": training, "batch_size": batch_size, "seed": seed}
        return open_timm(self.name, self.split, self.root, **passes, **self.options)

    def __len__(self) -> int:
        return len(self.open(training=False))


Split = Images | Stream


def open_images(
    data: str | Path,
    split: str = "train",
    *,
    root: str | Path | None = None,
    classes: dict[str, int] | None = None,
    unlabelled: bool = False,
    **options: Any,
) -> Split:
    """A split of a set. `classes` is the numbering of the training set, which a validation set must share;
    `unlabelled`, whether images without class folders will do; `options` go to timm's `create_dataset` for named
    sets."""
    name = str(data)
    prefix = name.split("/")[0]
    if name == "digits":
        source = Digits(split)
        return Images(name, source, [str(i) for i in range(10)], source.targets)
    if prefix in PREFIXES and "/" in name and not Path(name).exists():
        if root is None and prefix in ROOTED:
            raise LinvitError(f"{name} may lie anywhere: give its folder by --root DIR")
        folder = None if root is None else str(root)
        if prefix in STREAMS:
            return Stream(name, split, folder, options)
        dataset = open_timm(name, split, folder, **options)
        reader = getattr(dataset, "reader", None)  # timm's; none where it is torchvision's own class
        found = (getattr(dataset, names, None) for names in ("wnids", "classes"))  # torchvision's ImageNet has synsets
        names = next(filter(None, found), None) or getattr(reader, "class_to_idx", None) or ()
        source = dataset if reader is None else reader
        return Images(name, source, [str(one) for one in names], getattr(dataset, "targets", None))
    path = Path(data) if root is None else Path(root) / data
    return from_reader(open_reader(path, split, classes, unlabelled), name)


def from_reader(reader: FileReader, name: str, **facts: Any) -> Images:
    """A reader's images."""
    classes, labels = tuple(reader.class_to_idx), [label for _, label in reader.samples]
    return Images(name, reader, classes, labels, labelled=bool(classes), **facts)


def open_data(data: str | Path, *, root: str | Path | None = None, **options: Any) -> tuple[Any, Any]:
    """The training and the validation split of a set, with the same classes. Of a folder without splits some images
    are held out for validation."""
    train = open_images(data, "train", root=root, **options)
    if undivided(train):
        return hold_out(train)
    numbering = getattr(getattr(train, "source", None), "class_to_idx", None) or None
    return train, open_images(data, "validation", root=root, classes=numbering, **options)


def open_split(data: str | Path, split: str, *, root: str | Path | None = None, **options: Any) -> Split:
    """One split of a set, the same images that `open_data` gives; `all` of a set without splits, which `auto` means,
    too, where the validation split of others is meant."""
    images = open_images(data, "validation" if split == "auto" else split, root=root, **options)
    if not undivided(images) or split in ("all", "auto"):
        return images
    for names, part in zip(SPLITS.values(), hold_out(images), strict=True):
        if split in names:
            return part
    raise unknown("split", split, (*SPLITS, "all"))


def undivided(images: Split) -> TypeGuard[Images]:
    """Whether this is a folder or an archive without splits, all of it."""
    return isinstance(images, Images) and getattr(images.source, "chosen", "") is None


def hold_out(images: Images) -> tuple[Images, Images]:
    """Every tenth image of each class for validation, the last one of a class that has fewer."""
    order, ends = np.argsort(images.labels, kind="stable"), np.cumsum(np.bincount(images.labels))
    held = np.zeros(len(images), dtype=bool)
    for places in np.split(order, ends):  # of a class
        held[places[HELD_OUT - 1 :: HELD_OUT] if len(places) >= HELD_OUT else places[1:][-1:]] = True
    if not held.any():
        raise LinvitError(f"{images.name} has too few images to hold some out: put others in {images.name}/val/")
    note = f"{images.name} has no splits: {held.sum():,} of its {len(images):,} images are held out for validation"
    train, validation = (images.source.subset(np.flatnonzero(chosen).tolist()) for chosen in (~held, held))
    kept = from_reader(validation, images.name, note=note, held_out_of=len(images))
    return from_reader(train, images.name), kept


def check_outputs(images: Split, outputs: int) -> None:
    """Whether a model has an output for every class."""
    count = images.class_count
    if count is not None and count > outputs:
        hint = f"create it with num_classes={count}"
        raise LinvitError(f"{images.name} has {count} classes, the model {outputs} outputs: {hint}")


def open_timm(name: str, split: str, root: str | None, **options: Any) -> Any:
    """timm's dataset of this name, with what goes wrong in one line."""
    needs = f"{name} needs the package {PREFIXES[name.split('/')[0]]}"
    try:
        return create_dataset(name, root=root, split=split, **options)
    except (ImportError, NameError) as error:
        raise LinvitError(f"{needs}: {reason(error)}") from None
    except Exception as error:  # whatever the set's own library raises
        text = reason(error)
        missing = "Please install" in text
        raise LinvitError(f"{needs}, which is not installed" if missing else f"cannot open {name}: {text}") from None


class Digits:
    """scikit-learn's 1,797 digits of 8×8 pixels, which need no download; every fifth is for validation."""

    def __init__(self, split: str) -> None:
        from sklearn.datasets import load_digits

        if split not in ("train", "validation", "val", "test"):
            raise unknown("split", split, ("train", "validation"))
        found = load_digits()
        validation = np.arange(len(found.target)) % 5 == 0
        chosen = ~validation if split == "train" else validation
        self.pixels = np.round(found.images[chosen] * (255 / 16)).astype(np.uint8)
        self.targets = found.target[chosen]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]), int(self.targets[index])
