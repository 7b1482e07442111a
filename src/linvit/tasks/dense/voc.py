"""PASCAL VOC's format: JPEGImages, Annotations with an XML file for each image, ImageSets with a list for each split,
SegmentationClass and SegmentationObject with PNG files whose pixels are numbers.

Boxes count pixels from 1 and include their last one; here they count from 0 and end behind it. In SegmentationClass 0
is the background, which is a category of segmentation, and 255 the border, which is not judged. In SegmentationObject
the number of an object is its place in the XML file, from 1.
"""

import os
from xml.etree import ElementTree

from linvit.errors import LinvitError
from linvit.tasks.dense.files import Files, join
from linvit.tasks.dense.listing import listed_names
from linvit.tasks.dense.pixels import header_size
from linvit.tasks.dense.samples import Collector, DetectSamples, Row, Samples, SegmentSamples, labels_of

NAMES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
BACKGROUND = "background"
IMAGES, LISTS = "JPEGImages", "ImageSets"
SIDES = ("xmin", "ymin", "xmax", "ymax")


def splits(files: Files, base: str, masks: bool) -> dict[str, str]:
    """The list of each split: of images with masks, or of all."""
    found: dict[str, str] = {}
    for folder in ("Segmentation" if masks else "Main", "."):
        for name in files.listing(join(base, f"{LISTS}/{folder}")).files:
            stem, suffix = os.path.splitext(name)
            if suffix == ".txt" and "_" not in stem:  # the others are about one category each
                found.setdefault(stem, join(base, f"{LISTS}/{folder}/{name}"))
    return found


def read(files: Files, name: str, task: str, title: str, *, with_masks: bool = False) -> Samples:
    """A split by its list."""
    base = os.path.normpath(f"{name[: name.rindex(LISTS)]}.")
    stems = [line.split()[0] for line in files.text(name).splitlines() if line.strip()]
    if not stems:
        raise LinvitError(f"{files.full(name)} lists no image: put some in, or take the split away")
    names = listed_names(files, base)
    here = files.listing(join(base, IMAGES)).files
    by_stem = {os.path.splitext(file)[0]: file for file in here}
    missing = next((stem for stem in stems if stem not in by_stem), None)
    if missing is not None:
        raise LinvitError(f"{files.full(name)} lists {missing}, which is not in {files.full(join(base, IMAGES))}")
    images = {stem: join(base, f"{IMAGES}/{by_stem[stem]}") for stem in stems}
    if task == "segment":
        rows = [
            Row(image, number, None, present(files, join(base, f"SegmentationClass/{stem}.png")))
            for number, (stem, image) in enumerate(images.items())
        ]
        names = names or dict(enumerate(NAMES))
        if BACKGROUND not in names.values():
            names = {0: BACKGROUND, **{number + (0 in names): name for number, name in names.items()}}
        return SegmentSamples(title, tuple(names.values()), files, rows, labels=labels_of(list(names)))
    return detect(files, base, title, images, tuple(names.values()), with_masks)


def present(files: Files, name: str) -> str:
    if not files.has(name):
        raise LinvitError(f"{files.full(name)} is not there: put it there, or take the image out of the list")
    return name


def detect(
    files: Files, base: str, title: str, images: dict[str, str], names: tuple[str, ...], with_masks: bool
) -> DetectSamples:
    found = {}
    for stem in images:
        file = present(files, join(base, f"Annotations/{stem}.xml"))
        try:
            found[stem] = ElementTree.fromstring(files.read(file))
        except ElementTree.ParseError as error:
            raise LinvitError(f"{files.full(file)} is not XML: {error}") from None
    occurring = sorted({one.findtext("name", "").strip() for tree in found.values() for one in tree.iter("object")})
    categories = names or (NAMES if set(occurring) <= set(NAMES) else tuple(occurring))
    categories = tuple(name for name in categories if name != BACKGROUND)
    unlisted = [name for name in occurring if name not in categories]
    if unlisted:
        raise LinvitError(f"{title} has objects of category '{unlisted[0]}', which is not listed: add it to the list")
    collector, rows = Collector(with_masks), []
    for number, (stem, tree) in enumerate(found.items()):
        sides = [int(float(tree.findtext(f"size/{side}") or 0)) for side in ("height", "width")]
        size = (sides[0], sides[1]) if all(sides) else header_size(files, images[stem])
        first = len(collector)
        for place, one in enumerate(tree.iter("object"), start=1):
            collector.add(
                box_of(one, files.full(join(base, f"Annotations/{stem}.xml"))),
                size,
                categories.index(one.findtext("name", "").strip()),
                difficult=one.findtext("difficult", "0").strip() == "1",
                shape=place,
            )
        mask = present(files, join(base, f"SegmentationObject/{stem}.png")) if with_masks else ""
        rows.append(Row(images[stem], number, size, mask, first, len(collector)))
    return collector.samples(title, categories, files, rows)


def box_of(one: ElementTree.Element, where: str) -> tuple[float, float, float, float]:
    try:
        left, top, right, bottom = (float(one.findtext(f"bndbox/{side}", "")) for side in SIDES)
    except ValueError:
        name = one.findtext("name", "").strip()
        raise LinvitError(f"{where}: object '{name}' has no box: give xmin, ymin, xmax and ymax") from None
    return left - 1, top - 1, right, bottom
