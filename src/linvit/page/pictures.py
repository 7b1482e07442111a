"""Pictures that a browser sends, of which nothing is trusted, and photographs that every machine with linvit has."""

import warnings
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from linvit.errors import LinvitError
from linvit.images import FORMATS, eight_bits, naming, open_image, upright
from linvit.tasks.classify.decoding import channels_first

MOST_BYTES = 20 * 2**20  # of a file
MOST_SIDE, MOST_PIXELS = 12_000, 50_000_000
LEAST_SIDE = 8
KEPT_SIDE = 1536  # larger pictures are made smaller: no model here looks at more
THUMBNAIL = 112
JPEG = 88  # quality
SHIPPED = {"cat": "chelsea.png", "astronaut": "astronaut.png", "coffee": "coffee.png", "rocket": "rocket.jpg"}


def decode(data: bytes, name: str = "the file") -> Tensor:
    """A picture that was sent, as bytes `(3, height, width)`. Its size is looked at before its pixels are."""
    if not data:
        raise LinvitError("the file is empty: choose a picture")
    with warnings.catch_warnings(), naming(name):
        warnings.simplefilter("ignore")  # Pillow warns of what is refused here
        with Image.open(BytesIO(data), formats=FORMATS) as header:
            check_size(*header.size)
        picture = upright(open_image(data))
        picture.load()
        return shrunk(eight_bits(picture).convert("RGB"))


def check_size(width: int, height: int) -> None:
    if max(width, height) > MOST_SIDE or width * height > MOST_PIXELS:
        most = f"{MOST_SIDE:,} pixels a side and {MOST_PIXELS // 10**6} million in all"
        raise LinvitError(f"the picture has {width:,}×{height:,} pixels: at most {most} are taken, make it smaller")
    if min(width, height) < LEAST_SIDE:
        raise LinvitError(f"the picture has {width}×{height} pixels: give one of at least {LEAST_SIDE} a side")


def shrunk(picture: Image.Image) -> Tensor:
    scale = KEPT_SIDE / max(picture.size)
    if scale < 1:
        width, height = (max(LEAST_SIDE, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return channels_first(picture)


@cache
def samples() -> dict[str, Tensor]:
    """Photographs by name: scikit-image's, where it is installed, and scikit-learn's."""
    found: dict[str, Tensor] = {}
    spec = find_spec("skimage")
    for name, file in SHIPPED.items() if spec is not None and spec.origin else ():
        path = Path(str(spec.origin)).parent / "data" / file  # type: ignore[union-attr]
        if path.is_file():
            found[name] = decode(path.read_bytes(), file)
    import sklearn.datasets

    folder = Path(str(sklearn.datasets.__file__)).parent / "images"
    for name, file in {"flower": "flower.jpg", "temple": "china.jpg"}.items():
        if (folder / file).is_file():
            found[name] = decode((folder / file).read_bytes(), file)
    return found


@cache
def thumbnail(name: str) -> bytes:
    """The middle of a sample, as JPEG."""
    picture = Image.fromarray(samples()[name].permute(1, 2, 0).numpy())
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    return jpeg(picture.resize((THUMBNAIL, THUMBNAIL), box=(left, top, left + side, top + side)))


def jpeg(picture: Image.Image | np.ndarray) -> bytes:
    file = BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.convert("RGB").save(file, "JPEG", quality=JPEG)
    return file.getvalue()
