"""Small sets for detection and segmentation: red squares and green bars on grey noise."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("ground", "square", "bar")
COLOURS = ((220, 40, 40), (40, 200, 60))
SHAPES = ((24, 24), (12, 40))  # height and width
SIZE = 64


def picture(seed: int) -> tuple[np.ndarray, np.ndarray, list[tuple[int, list[int]]]]:
    """Pixels, labels of pixels, and the objects: label and left, top, width, height."""
    noise = np.random.default_rng(seed)
    pixels = noise.integers(90, 140, (SIZE, SIZE, 3))
    labels, objects = np.zeros((SIZE, SIZE), np.uint8), []
    for kind, (height, width) in enumerate(SHAPES):
        top, left = (int(noise.integers(0, SIZE // 2 - side // 2) + kind * side // 2) for side in (height, width))
        top, left = min(top, SIZE - height), min(left, SIZE - width)
        place = np.s_[top : top + height, left : left + width]
        pixels[place] = COLOURS[kind]
        labels[place] = kind + 1
        objects.append((kind, [left, top, width, height]))
    return pixels.astype(np.uint8), labels, objects


def write_masks(folder: Path, train: int = 12, validation: int = 6) -> Path:
    """A set for segmentation, as ADE20K lies."""
    for split, count, first in (("training", train, 0), ("validation", validation, 100)):
        for kind in ("images", "annotations"):
            (folder / kind / split).mkdir(parents=True)
        for index in range(count):
            pixels, labels, _ = picture(first + index)
            Image.fromarray(pixels).save(folder / "images" / split / f"{index}.png")
            Image.fromarray(labels).save(folder / "annotations" / split / f"{index}.png")
    (folder / "classes.txt").write_text("\n".join(NAMES))
    return folder


def write_boxes(folder: Path, train: int = 12, validation: int = 6) -> Path:
    """A set for detection, as COCO lies."""
    for split, count, first in (("train", train, 0), ("val", validation, 100)):
        (folder / split).mkdir(parents=True)
        images, annotations = [], []
        for index in range(count):
            pixels, _, objects = picture(first + index)
            Image.fromarray(pixels).save(folder / split / f"{index}.png")
            images.append({"id": index, "file_name": f"{index}.png", "height": SIZE, "width": SIZE})
            for label, box in objects:
                left, top, width, height = box
                about = {"id": len(annotations) + 1, "image_id": index, "category_id": label, "bbox": box}
                corners = [left, top, left + width, top, left + width, top + height, left, top + height]
                annotations.append({**about, "area": width * height, "iscrowd": 0, "segmentation": [corners]})
        categories = [{"id": label, "name": name} for label, name in enumerate(NAMES[1:])]
        (folder / "annotations").mkdir(exist_ok=True)
        told = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(told))
    return folder
