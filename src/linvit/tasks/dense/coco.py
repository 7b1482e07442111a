"""COCO's format: a JSON file for each split, with images beside it.

    annotations/instances_train2017.json   train2017/*.jpg           as COCO has it
    annotations/train.json                 images/train/*.jpg        anybody's
    train/_annotations.coco.json           train/*.jpg               as labelling tools export it

Labels are the places of categories by their ids. For segmentation there are mask files beside the images,
`masks/train/*.png`, whose pixels are category ids; where no category has the id 0, that is the background.
"""

import os
import pickle
import re
from typing import Any

from linvit.errors import LinvitError
from linvit.tasks.classify.readers import SPLIT_FOLDERS
from linvit.tasks.dense.files import Files, join
from linvit.tasks.dense.pixels import Size, header_size
from linvit.tasks.dense.samples import Collector, DetectSamples, Row, Samples, SegmentSamples, labels_of

JSON = re.compile(r"(?:instances_)?(?P<split>[a-z]+)(?:20\d\d)?\.json")
EXPORTED = "_annotations.coco.json"
BACKGROUND = "background"


def splits(files: Files, base: str) -> dict[str, str]:
    """The JSON file of each split."""
    found: dict[str, str] = {}
    for folder in ("annotations", "."):
        for name in sorted(files.listing(join(base, folder)).files, reverse=True):  # of several years the last one
            match = JSON.fullmatch(name)
            if match and match["split"] in SPLIT_FOLDERS | {"trainval"}:
                found.setdefault(match["split"], join(base, f"{folder}/{name}"))
    for folder in files.listing(base).folders & SPLIT_FOLDERS:
        if files.has(join(base, f"{folder}/{EXPORTED}")):
            found.setdefault(folder, join(base, f"{folder}/{EXPORTED}"))
    return found


def read(files: Files, name: str, task: str, title: str, *, with_masks: bool = False, root: str = "") -> Samples:
    """A split by its JSON file; its images lie in `root`, else where they usually do."""
    where = files.full(name)
    data = files.json(name)
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(field(data, key), list)]
    if missing:
        raise LinvitError(f"{where} is not in COCO's format: it has no list of {missing[0]}")
    try:
        if not data["images"]:
            raise LinvitError(f"{where} has no image: put some in, or take the split away")
        categories = {int(one["id"]): str(one["name"]) for one in sorted(data["categories"], key=lambda c: c["id"])}
        folder = root or image_folder(files, name, data["images"][0]["file_name"])
        if task == "segment":
            return segment(files, name, title, data["images"], categories, folder)
        return detect(files, name, title, data, categories, folder, with_masks)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, LinvitError):
            raise
        raise LinvitError(f"{where} is not in COCO's format: {type(error).__name__} {error}") from None


def field(data: Any, key: str) -> Any:
    return data.get(key) if isinstance(data, dict) else None


def image_folder(files: Files, name: str, first: str) -> str:
    """The folder that has the first image."""
    base, file = os.path.split(name)
    stem = file.removesuffix(".json").removeprefix("instances_")
    split = re.sub(r"20\d\d$", "", stem)
    outer = os.path.dirname(base) if os.path.basename(base) == "annotations" else base
    inner = (stem, f"images/{stem}", f"images/{split}", split, f"{split}/images", "images", ".")
    looked = list(dict.fromkeys(join(outer or ".", folder) for folder in inner))
    found = next((folder for folder in looked if files.has(join(folder, first))), None)
    if found is None:
        places = ", ".join(files.full(folder) for folder in looked[:3])
        raise LinvitError(f"{files.full(name)} names {first}, which is not there (looked in {places}, …)")
    return found


def detect(
    files: Files, name: str, title: str, data: Any, categories: dict[int, str], folder: str, with_masks: bool
) -> DetectSamples:
    where, places = files.full(name), {number: place for place, number in enumerate(categories)}
    images = {int(one["id"]): one for one in data["images"]}
    if len(images) < len(data["images"]):
        raise LinvitError(f"{where} has two images of one id: give each its own")
    per_image: dict[int, list[Any]] = {number: [] for number in images}
    for one in data["annotations"]:
        if one["image_id"] not in per_image:
            odd = f"annotation {one.get('id')} is for image {one['image_id']}, which is not listed"
            raise LinvitError(f"{where}: {odd}: add it to images, or take the annotation out")
        if one["category_id"] not in places:
            odd = f"annotation {one.get('id')} has category {one['category_id']}, which is not listed"
            raise LinvitError(f"{where}: {odd}: add it to categories")
        per_image[one["image_id"]].append(one)
    collector, rows = Collector(with_masks), []
    for number, image in images.items():
        file = image_file(files, name, folder, image["file_name"])
        size = size_of(files, image, file)
        first = len(collector)
        for one in per_image[number]:
            left, top, width, height = box_of(one, where)
            collector.add(
                (left, top, left + width, top + height),
                size,
                places[one["category_id"]],
                iscrowd=bool(one.get("iscrowd")),
                difficult=bool(one.get("difficult")),
                area=one.get("area"),
                shape=pickle.dumps(one["segmentation"]) if with_masks and one.get("segmentation") else None,
            )
        rows.append(Row(file, number, size, "", first, len(collector)))
    if with_masks and collector.shapeless and not len(collector):
        raise LinvitError(f"{where} has boxes but no masks: give each annotation a segmentation, or take another model")
    return collector.samples(title, tuple(categories.values()), files, rows)


def box_of(one: Any, where: str) -> list[float]:
    box = one.get("bbox")
    if not isinstance(box, list) or len(box) != 4:
        hint = "give left, top, width and height as its bbox"
        raise LinvitError(f"{where}: annotation {one.get('id')} has no box: {hint}")
    return [float(side) for side in box]


def image_file(files: Files, name: str, folder: str, file: str) -> str:
    """The name of an image that has to be there."""
    found = join(folder, file)
    if not files.has(found):
        hint = "put it there, or take it out of the list"
        raise LinvitError(f"{files.full(name)} names {file}, which is not in {files.full(folder)}: {hint}")
    return found


def size_of(files: Files, image: Any, file: str) -> Size:
    """Height and width as noted, else from the file."""
    if image.get("height") and image.get("width"):
        return int(image["height"]), int(image["width"])
    return header_size(files, file)


def segment(
    files: Files, name: str, title: str, images: list[Any], categories: dict[int, str], folder: str
) -> SegmentSamples:
    parts = folder.split("/")
    outer = "/".join(parts[:-2] if parts[-2:-1] == ["images"] else parts[:-1]) or "."
    looked = (join(outer, f"masks/{parts[-1]}"), join(outer, "masks"), join(outer, f"{parts[-1]}/masks"))
    masks = next((one for one in looked if files.listing(one).files), None)
    if masks is None:
        hint = f"put mask files in {files.full(looked[0])}"
        raise LinvitError(f"{files.full(name)} lists objects, which do not cover all pixels: {hint}")
    rows = []
    for image in images:
        mask = join(masks, image.get("mask") or f"{os.path.splitext(image['file_name'])[0]}.png")
        if not files.has(mask):
            raise LinvitError(f"image {image['file_name']} has no mask: put it at {files.full(mask)}")
        rows.append(Row(image_file(files, name, folder, image["file_name"]), int(image["id"]), None, mask))
    if 0 not in categories:
        categories = {0: BACKGROUND, **categories}
    labels = labels_of(list(categories))
    return SegmentSamples(title, tuple(categories.values()), files, rows, labels=labels)
