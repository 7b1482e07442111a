"""From files to pixels: photographs, maps of labels, masks of single objects. What is wrong names its file."""

import pickle
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from linvit.errors import LinvitError, reason
from linvit.images import eight_bits, naming, open_image, upright
from linvit.tasks.classify.decoding import channels_first
from linvit.tasks.dense.files import Files

INDEXED = ("P", "L", "1", "I", "I;16", "I;16B", "I;16L")  # Pillow's modes with one number a pixel
HINT = "replace it or take it out"
Size = tuple[int, int]  # height and width


def open_picture(files: Files, name: str) -> Image.Image:
    """A decoded file."""
    with naming(files.full(name), HINT):
        picture = open_image(files.read(name))
        picture.load()
        return picture


def read_photograph(files: Files, name: str) -> Tensor:
    """The same of a photograph without annotations, turned as its EXIF says."""
    raw = open_picture(files, name)
    with naming(files.full(name), HINT):
        return channels_first(eight_bits(upright(raw)).convert("RGB"))


def read_image(files: Files, name: str, size: Size, source: str) -> Tensor:
    """A photograph, uint8 `(3, height, width)`, turned as its EXIF says, unless it has the `size` of its annotations
    only as it lies. They are `source`."""
    raw = open_picture(files, name)
    with naming(files.full(name), HINT):
        picture = upright(raw)
        if size_of(picture) != size:
            if size_of(raw) != size:
                found, wanted = in_words(size_of(picture)), in_words(size)
                hint = "give both the same size"
                raise LinvitError(f"image {files.full(name)} has {found} pixels, and {wanted} by {source}: {hint}")
            picture = raw
        return channels_first(eight_bits(picture).convert("RGB"))


def header_size(files: Files, name: str) -> Size:
    """The size of a photograph, turned as its EXIF says."""
    with naming(files.full(name), HINT):
        return size_of(upright(open_image(files.read(name))))


def read_indices(files: Files, name: str, size: Size | None = None) -> np.ndarray:
    """A picture whose pixels are numbers of categories or objects, `(height, width)`, of its photograph's size."""
    picture = open_picture(files, name)
    if picture.mode not in INDEXED:
        hint = "give one number a pixel, by a palette or in grey"
        raise LinvitError(f"mask {files.full(name)} has colours (mode {picture.mode}): {hint}")
    if size is not None and size_of(picture) != size:
        found, wanted = in_words(size_of(picture)), in_words(size)
        raise LinvitError(f"mask {files.full(name)} has {found} pixels, its image {wanted}: give both the same size")
    return np.asarray(picture).astype(np.int32)


def draw(shape: Any, size: Size) -> np.ndarray:
    """An object's mask, uint8 `(height, width)`, from COCO's polygons or its RLE, compressed or not."""
    try:
        from faster_coco_eval.core import mask as coco
    except ImportError:
        raise LinvitError("masks of COCO's format need faster-coco-eval: pip install faster-coco-eval") from None
    if isinstance(shape, dict) and isinstance(shape.get("counts"), str):
        return coco.decode({**shape, "counts": shape["counts"].encode()})
    parts = coco.frPyObjects(shape, *size)
    return coco.decode(coco.merge(parts) if isinstance(parts, list) else parts)


def draw_all(shapes: list[bytes], size: Size, name: str) -> Tensor:
    """The masks of an image's objects, uint8 `(objects, height, width)`, from their shapes, pickled."""
    masks = torch.zeros(len(shapes), *size, dtype=torch.uint8)
    for place, shape in enumerate(shapes):
        try:
            masks[place] = torch.from_numpy(draw(pickle.loads(shape), size))
        except LinvitError:
            raise
        except Exception as error:  # whatever COCO's library makes of a broken shape
            odd = f"an object of {name} has a segmentation that cannot be drawn"
            raise LinvitError(f"{odd} ({reason(error)}): give polygons or RLE of the image's size") from None
    return masks


def size_of(picture: Image.Image) -> Size:
    return picture.height, picture.width


def in_words(size: Size) -> str:
    return f"{size[1]}×{size[0]}"
