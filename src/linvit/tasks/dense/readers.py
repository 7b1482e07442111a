"""Sets for detection and segmentation, told apart by what lies in their folder or archive.

    open_dense("voc256.tar", "detect")           # train and validation
    open_dense_split("VOCdevkit/VOC2012", "segment", "trainval")

Formats are COCO's, PASCAL VOC's and folders of mask files like ADE20K's; `coco`, `voc` and `folders` say what they are.
A folder of images and nothing else is a training set without annotations.
"""

import os
from pathlib import Path
from typing import NamedTuple

from linvit.errors import LinvitError, unknown
from linvit.tasks.classify.readers import SPLITS
from linvit.tasks.dense import coco, folders, voc
from linvit.tasks.dense.files import Files, join
from linvit.tasks.dense.photographs import photographs_in
from linvit.tasks.dense.samples import Samples, match_categories

TASKS = ("detect", "segment")


class Found(NamedTuple):
    """A set: its format, and for each split what the format reads it by."""

    files: Files
    format: str
    splits: dict[str, str]


def open_dense(
    data: str | Path, task: str, *, masks: bool = False, root: str | Path | None = None
) -> tuple[Samples, Samples | None]:
    """The training and the validation split of a set, with the same categories; no validation split where the set has
    none. `masks` asks for a mask of each object as well; `root` is the folder of images for a single file of COCO's
    format, which is a training split. Images without annotations are one, too, for stages that need none."""
    if Path(data).suffix != ".json" and (loose := photographs_in(Files(data), ".", str(data), task, masks)) is not None:
        return loose, None
    found = find(data, task, masks)
    train = read(found, data, task, "train", masks, root)
    if choose(found, "validation") is None:
        return train, None
    validation = read(found, data, task, "validation", masks, root)
    if not set(validation.categories) <= set(train.categories):
        odd = next(name for name in validation.categories if name not in train.categories)
        raise LinvitError(f"{validation.name} has category '{odd}', which the training set has not: give both the same")
    return train, match_categories(validation, train.categories)


def open_dense_split(
    data: str | Path, task: str, split: str, *, masks: bool = False, root: str | Path | None = None
) -> Samples:
    """One split of a set."""
    return read(find(data, task, masks), data, task, split, masks, root)


def find(data: str | Path, task: str, masks: bool) -> Found:
    """What a path holds. A folder that is alone in another is looked into."""
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    path = Path(data)
    if path.suffix == ".json" and path.is_file():
        folder = path.absolute().parent
        return Found(Files(folder.parent), "coco", {"train": f"{folder.name}/{path.name}"})
    files, base = Files(path), "."
    while True:
        inner = files.listing(base)
        if voc.IMAGES in inner.folders:
            return Found(files, "voc", voc.splits(files, base, masks or task == "segment"))
        if splits := coco.splits(files, base):
            return Found(files, "coco", splits)
        if splits := folders.splits(files, base):
            if task == "detect":
                raise LinvitError(f"{data} has mask files but no boxes: detection needs COCO's or PASCAL VOC's format")
            return Found(files, "folders", splits)
        if len(inner.folders) != 1:
            break
        base = join(base, next(iter(inner.folders)))
    years = [name for name in sorted(inner.folders) if voc.IMAGES in files.listing(join(base, name)).folders]
    if years:
        raise LinvitError(f"{data} holds several sets: give one of them, such as {os.path.join(data, years[-1])}")
    wanted = "annotations/train.json (COCO), JPEGImages (PASCAL VOC)"
    wanted += " or images/train with masks/train" if task == "segment" else ""
    raise LinvitError(f"{data} is in no format known here: it has no {wanted}")


def choose(found: Found, split: str) -> str | None:
    """The set's own name of a split."""
    names = (split, *next((names for names in SPLITS.values() if split in names), ()))
    return next((name for name in names if name in found.splits), None)


def read(found: Found, data: str | Path, task: str, split: str, masks: bool, root: str | Path | None) -> Samples:
    own = choose(found, split)
    if own is None:
        there = ", ".join(sorted(found.splits)) or "none"
        raise LinvitError(f"{data} has no split '{split}': its splits are {there}")
    title, name = f"{data} ({own})", found.splits[own]
    if found.format == "coco":
        where = "" if root is None else str(Path(root).absolute())
        return coco.read(found.files, name, task, title, with_masks=masks, root=where)
    if found.format == "voc":
        return voc.read(found.files, name, task, title, with_masks=masks)
    return folders.read(found.files, name, title)
