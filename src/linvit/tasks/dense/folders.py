"""Folders of images and of mask files, as ADE20K has them: `images/training/*.jpg` and `annotations/training/*.png`.

A mask file has its image's name, and a number in each pixel. Names are listed in a file beside the folders (see
`listing`). Numbers that are not listed are mistakes, but 255 is not judged, nor is 0 where names begin with 1, as in
ADE20K. Where nothing is listed every number up to the largest is a category: `class 0`, `class 1`, and so on.
"""

import os

import numpy as np

from linvit.errors import LinvitError
from linvit.images import is_image
from linvit.models.dense import IGNORED
from linvit.tasks.classify.readers import SPLIT_FOLDERS
from linvit.tasks.dense.files import Files, join
from linvit.tasks.dense.listing import ADE, listed_names
from linvit.tasks.dense.pixels import read_indices
from linvit.tasks.dense.samples import Row, SegmentSamples, labels_of

IMAGES = ("images", "img_dir", "imgs")
LOOKED_AT = 8  # masks that are looked at beforehand
MASKS = ("masks", "annotations", "ann_dir", "labels")


def splits(files: Files, base: str) -> dict[str, str]:
    """The folder of images of each split that has masks as well."""
    found: dict[str, str] = {}
    for images in IMAGES:
        for split in sorted(files.listing(join(base, images)).folders & SPLIT_FOLDERS):
            folder = join(base, f"{images}/{split}")
            if mask_folder(files, base, split):
                found.setdefault(split, folder)
    return found


def mask_folder(files: Files, base: str, split: str) -> str | None:
    return next((found for masks in MASKS if next(files.below(found := join(base, f"{masks}/{split}")), None)), None)


def read(files: Files, name: str, title: str) -> SegmentSamples:
    """A split by its folder of images."""
    outer, split = os.path.split(name)
    base = os.path.dirname(outer) or "."
    folder = mask_folder(files, base, split)
    assert folder is not None
    images = {stem(file, name): file for file in files.below(name) if is_image(file)}
    masks = {stem(file, folder): file for file in files.below(folder) if is_image(file)}
    for one, others, where in ((images, masks, folder), (masks, images, name)):
        lonely = next((file for key, file in one.items() if key not in others), None)
        if lonely is not None:
            lacking = f"{files.full(lonely)} has nothing of its name in {files.full(where)}"
            raise LinvitError(f"{lacking}: add that, or take it away")
    rows = [Row(file, number, None, masks[key]) for number, (key, file) in enumerate(images.items())]
    check_numbers(files, [row.mask for row in rows[:LOOKED_AT]], files.full(folder))
    names, note = listed_names(files, base), ""
    if not names and rows:
        largest = max((largest_number(files, row.mask) for row in rows), default=-1)
        names = {number: f"class {number}" for number in range(largest + 1)}
        hint = f"list names in classes.txt, or add ADE20K's {ADE}, in which 0 is no category"
        note = f"{title} names no categories, so its masks' numbers from 0 to {largest} are its categories: {hint}"
    ignored = (IGNORED,) if 0 in names else (0, IGNORED)
    labels = labels_of(list(names), ignored=ignored)
    return SegmentSamples(title, tuple(names.values()), files, rows, note, labels=labels)


def check_numbers(files: Files, masks: list[str], where: str) -> None:
    """Black and white is what people draw masks in, but white is 255, which would not be judged."""
    found = {int(number) for mask in masks for number in np.unique(read_indices(files, mask))}
    if found == {0, IGNORED}:
        raise LinvitError(f"{where} has masks of 0 and {IGNORED} alone, and {IGNORED} is not judged: write 1 for white")


def stem(file: str, folder: str) -> str:
    return os.path.splitext(file[len(folder) + 1 :])[0]


def largest_number(files: Files, name: str) -> int:
    numbers = read_indices(files, name)
    return int(np.max(numbers, where=numbers != IGNORED, initial=0))
