"""Annotated photographs for detection and segmentation: six that come with scikit-image, with outlines drawn by hand.

Each writer makes a set of them in one of the formats: the photographs for training, their mirror images for validation.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import skimage.data
from PIL import Image, ImageDraw, ImageOps

CATEGORIES = ("cat", "cup", "motorcycle", "person", "rocket")
OUTLINES = {  # in thousandths of width and height
    "astronaut.png": (
        (
            "person",
            "440 27, 371 41, 308 96, 302 179, 335 242, 365 275, 357 297, 275 308, 234 357, "
            "234 412, 220 453, 151 495, 69 591, 47 742, 55 852, 115 997, 544 997, 549 879, "
            "571 783, 618 720, 709 681, 679 536, 618 495, 591 467, 596 398, 563 330, 503 288, "
            "503 253, 563 225, 588 151, 563 69, 508 36",
        ),
        (
            "rocket",
            "805 0, 772 69, 764 343, 692 434, 695 516, 865 516, 860 412, 885 385, 885 124, 857 124, 852 55, 832 5",
        ),
    ),
    "chelsea.png": (
        (
            "cat",
            "25 0, 835 0, 846 165, 799 434, 750 578, 725 764, 648 888, 607 996, 104 996, 93 764, 5 496",
        ),
    ),
    "coffee.png": (
        (
            "cup",
            "288 206, 321 103, 390 49, 486 41, 582 62, 651 123, 679 206, 670 329, 651 453, "
            "624 576, 555 638, 486 659, 431 650, 423 741, 376 782, 335 741, 327 617, 335 556, "
            "302 412",
        ),
    ),
    "rocket.jpg": (("rocket", "500 292, 486 342, 486 642, 481 951, 522 951, 519 642, 519 342"),),
    "motorcycle_left.png": (
        (
            "motorcycle",
            "132 411, 168 383, 209 370, 209 297, 264 330, 374 370, 429 370, 497 269, 538 228, "
            "621 248, 676 269, 703 228, 758 289, 758 350, 717 391, 745 472, 841 554, 909 676, "
            "918 798, 882 899, 827 887, 758 798, 703 676, 662 554, 648 676, 621 737, 497 757, "
            "456 765, 456 859, 434 859, 429 757, 346 757, 291 798, 209 757, 168 655, 176 533, "
            "223 480, 140 460",
        ),
    ),
    "camera.png": (
        (
            "person",
            "330 157, 308 225, 275 239, 165 253, 55 308, 0 404, 0 1000, 343 1000, 343 885, "
            "275 747, 302 651, 412 569, 522 596, 591 527, 632 418, 646 363, 508 363, 516 198, "
            "481 157, 412 129",
        ),
    ),
}


class Object(NamedTuple):
    category: str
    outline: list[tuple[float, float]]

    @property
    def box(self) -> tuple[float, float, float, float]:
        across, down = zip(*self.outline, strict=True)
        return min(across), min(down), max(across), max(down)


class Photograph(NamedTuple):
    name: str
    picture: Image.Image
    objects: list[Object]

    def numbers(self) -> np.ndarray:
        """The number of the object in each pixel, from 1; 0 where there is none."""
        drawn = Image.new("L", self.picture.size)
        for number, one in enumerate(self.objects, start=1):
            ImageDraw.Draw(drawn).polygon(one.outline, fill=number)
        return np.array(drawn)

    def labels(self) -> np.ndarray:
        """The category in each pixel, from 1; 0 where there is none."""
        table = [0, *(1 + CATEGORIES.index(one.category) for one in self.objects)]
        return np.array(table, dtype=np.uint8)[self.numbers()]


@cache
def photographs(side: int = 160, mirrored: bool = False) -> tuple[Photograph, ...]:
    """The photographs, their longer side so many pixels."""
    found = []
    for file, outlines in OUTLINES.items():
        picture = Image.open(Path(skimage.data.__file__).parent / file).convert("RGB")
        picture.thumbnail((side, side), Image.Resampling.BICUBIC)
        objects = []
        for category, text in outlines:
            points = [tuple(int(number) / 1000 for number in point.split()) for point in text.split(",")]
            points = [((1 - x if mirrored else x) * picture.width, y * picture.height) for x, y in points]
            objects.append(Object(category, points))
        found.append(Photograph(file.split(".")[0], ImageOps.mirror(picture) if mirrored else picture, objects))
    return tuple(found)


def splits(side: int) -> dict[str, tuple[Photograph, ...]]:
    return {"train": photographs(side), "val": photographs(side, mirrored=True)}


def save(picture: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **({"quality": 95} if path.suffix == ".jpg" else {}))


def write(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def indexed(numbers: np.ndarray) -> Image.Image:
    """A picture with a palette, as VOC has them."""
    picture = Image.fromarray(numbers.astype(np.uint8), mode="P")
    picture.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return picture


def write_coco(folder: Path, side: int = 160) -> Path:
    """COCO's format, with outlines as polygons, and mask files for segmentation."""
    for split, found in splits(side).items():
        images, annotations = [], []
        for number, one in enumerate(found, start=1):
            save(one.picture, folder / "images" / split / f"{one.name}.jpg")
            save(indexed(one.labels()), folder / "masks" / split / f"{one.name}.png")
            width, height = one.picture.size
            images.append({"id": number, "file_name": f"{one.name}.jpg", "width": width, "height": height})
            for place, thing in enumerate(one.objects):
                left, top, right, bottom = thing.box
                annotation = {"id": 10 * number + place, "image_id": number, "iscrowd": 0}
                annotation["category_id"] = 1 + CATEGORIES.index(thing.category)
                annotation["bbox"] = [left, top, right - left, bottom - top]
                annotation["area"] = float((one.numbers() == place + 1).sum())
                annotation["segmentation"] = [[side for point in thing.outline for side in point]]
                annotations.append(annotation)
        categories = [{"id": number, "name": name} for number, name in enumerate(CATEGORIES, start=1)]
        data = {"images": images, "annotations": annotations, "categories": categories}
        write(json.dumps(data), folder / "annotations" / f"{split}.json")
    return folder


def write_voc(folder: Path, side: int = 160) -> Path:
    """PASCAL VOC's format; validation's photographs have names of their own."""
    write("\n".join(("background", *CATEGORIES)), folder / "classes.txt")
    for split, found in splits(side).items():
        names = []
        for one in found:
            name = f"{split}_{one.name}"
            names.append(name)
            width, height = one.picture.size
            objects = ""
            for thing in one.objects:
                sides = zip(("xmin", "ymin", "xmax", "ymax"), thing.box, strict=True)
                box = "".join(f"<{side}>{value + side.endswith('min'):.3f}</{side}>" for side, value in sides)
                facts = f"<name>{thing.category}</name><difficult>0</difficult><bndbox>{box}</bndbox>"
                objects += f"<object>{facts}</object>"
            size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
            write(f"<annotation>{size}{objects}</annotation>", folder / "Annotations" / f"{name}.xml")
            save(one.picture, folder / "JPEGImages" / f"{name}.jpg")
            save(indexed(one.labels()), folder / "SegmentationClass" / f"{name}.png")
            save(indexed(one.numbers()), folder / "SegmentationObject" / f"{name}.png")
        for kind in ("Main", "Segmentation"):
            write("\n".join(names) + "\n", folder / "ImageSets" / kind / f"{split}.txt")
    return folder


def write_ade(folder: Path, side: int = 160) -> Path:
    """ADE20K's format: 0 is no category."""
    lines = [f"{number}\t0.1\t9\t1\t{name}, another word" for number, name in enumerate(CATEGORIES, start=1)]
    write("\n".join(("Idx\tRatio\tTrain\tVal\tName", *lines)), folder / "objectInfo150.txt")
    for split, found in zip(("training", "validation"), splits(side).values(), strict=True):
        for one in found:
            save(one.picture, folder / "images" / split / f"{one.name}.jpg")
            save(Image.fromarray(one.labels()), folder / "annotations" / split / f"{one.name}.png")
    return folder
