"""Image files as linvit reads them, for whatever purpose: which are images, which way up they are, how bright.

Only a few formats are opened, whatever a file is called: Pillow knows fifty, and starts other programs for some.
"""

import os
import stat
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from linvit.errors import LinvitError, Unreadable, reason

SUFFIXES = {".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
ORIENTATION = 0x0112  # EXIF's tag
DEPTHS = (8, 10, 12, 14, 16)  # bits of a channel that cameras and scanners use of 16
AT_ONCE = 10_000  # images that wait for threads
BROKEN = (  # what Pillow makes of broken files
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, ArithmeticError, LookupError, struct.error),
    Image.DecompressionBombError,
)
NATIVE = "L" if sys.byteorder == "little" else "B"  # Pillow's letter for this machine's byte order
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
SPECIAL = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}

warnings.filterwarnings("ignore", message="Corrupt EXIF data")  # Pillow's, for each of ImageNet's such files


def is_image(name: str) -> bool:
    """Whether a file is an image by its suffix."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


class Walk:
    """Folders entered once each. A link to a folder is followed, but one that leads back to what is around it or read
    already is an error: images would be there twice, and in the wrong class. `apart` are folders that no link leads
    into, unless it lies there itself."""

    def __init__(self, apart: Sequence[Path] = ()) -> None:
        self.apart = [os.path.realpath(folder) for folder in apart]
        self.seen: dict[str, str] = {}

    def enter(self, folder: str, top: str) -> None:
        real, base = os.path.realpath(folder), os.path.realpath(top)
        around = real != base and inside(base, real)
        elsewhere = any(inside(real, other) for other in self.apart) and not inside(real, base)
        if around or elsewhere or real in self.seen:
            why = f"which is read as {self.seen[real]} too" if real in self.seen else "which is around or beside it"
            raise LinvitError(f"{folder} leads to {real}, {why}: remove the link")
        self.seen[real] = folder


def inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def images_below(folder: Path, walk: Walk | None = None) -> Iterator[str]:
    """The images in a folder and anywhere below it."""
    walk = walk or Walk()
    folders = [str(folder)]
    while folders:
        current = folders.pop()
        walk.enter(current, str(folder))
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError as error:
            raise LinvitError(f"cannot read folder {current}: {error.strerror}") from None
        for entry in entries:
            if entry.is_dir():
                folders.append(entry.path)
            elif is_image(entry.name):
                if not entry.is_file():
                    check_file(entry.path)
                yield entry.path


def check_file(path: str | Path) -> None:
    """Whether this is a file and not what would be waited for without end. A link to nothing is for its reader."""
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise LinvitError(f"{path} is {SPECIAL.get(stat.S_IFMT(mode), 'a device')}: give a file")


@contextmanager
def naming(name: str, hint: str = "") -> Iterator[None]:
    """What goes wrong with an image inside names its file."""
    try:
        yield
    except LinvitError:
        raise
    except UnidentifiedImageError:
        raise Unreadable((name, f"it is none of {', '.join(FORMATS)}"), hint=hint) from None
    except BROKEN as error:
        raise Unreadable((name, reason(error)), hint=hint) from None


@contextmanager
def quiet(what: str, total: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


def read_all(
    read: Callable[[Any], object], images: Sequence[Any], what: str = "reading images", progress: Progress = quiet
) -> None:
    """Read images in threads, for Pillow lets others work while it decodes. Those that cannot be read are one error at
    the end that names them all."""

    def attempt(image: Any) -> Unreadable | None:
        try:
            read(image)
        except Unreadable as error:
            return error
        return None

    found: list[Unreadable] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, progress(what, len(images)) as advance:
        for start in range(0, len(images), AT_ONCE):
            for error in pool.map(attempt, images[start : start + AT_ONCE]):
                found += [error] if error is not None else []
                advance()
    if found:
        raise Unreadable(*(file for error in found for file in error.files), hint=found[0].hint)


@contextmanager
def naming_all(read: Callable[[int], object], count: int, progress: Progress = quiet) -> Iterator[None]:
    """Where one image of a set cannot be read others may be as bad: the error inside becomes one of all of them."""
    try:
        yield
    except Unreadable:
        read_all(read, range(count), "looking for broken images", progress)
        raise


def open_image(file: BinaryIO | bytes) -> Image.Image:
    """An image as it lies in its file, of which only the header may have been read."""
    source = BytesIO(file) if isinstance(file, bytes) else file
    return with_all_bits(Image.open(source, formats=FORMATS), source)


def upright(picture: Image.Image) -> Image.Image:
    """The picture turned as its EXIF says; one that lies right may not be decoded yet."""
    return ImageOps.exif_transpose(picture) if orientation(picture) != 1 else picture


def orientation(picture: Image.Image) -> int:
    """How EXIF says that a picture lies, 1 for upright; what cannot be read of it says nothing."""
    if picture.format == "PNG":
        picture.load()  # its EXIF may come last
    try:
        found = picture.getexif().get(ORIENTATION, 1)
    except BROKEN:
        return 1
    return found if found in range(1, 9) else 1


def with_all_bits(picture: Image.Image, file: Any) -> Image.Image:
    """A picture of colours with 16 bits a channel, of which Pillow keeps the upper eight: those that are used, else
    what has 12 would be black. Their lower eight are what Pillow reads when told the other byte order."""
    tiles: Any = getattr(picture, "tile", None)
    kind = tiles[0][3] if tiles else ""
    kind = kind[0] if isinstance(kind, tuple) else kind
    if picture.mode not in ("RGB", "RGBA") or str(kind)[:-1] != f"{picture.mode};16":
        return picture
    upper = np.asarray(picture).astype(np.uint16)
    if upper[..., :3].max() >= 64:  # more than 14 bits
        return picture
    file.seek(0)
    other: Any = Image.open(file, formats=FORMATS)
    other.tile = [tile._replace(args=swapped(tile.args)) for tile in other.tile]
    values = upper << 8 | np.asarray(other)
    values[..., :3] = values[..., :3] >> (depth(int(values[..., :3].max())) - 8)
    values[..., 3:] = upper[..., 3:]
    return Image.fromarray(values.astype(np.uint8), picture.mode)


def swapped(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return (swapped(kind[0]), *kind[1:])
    order = kind[-1] if kind[-1] != "N" else NATIVE
    return f"{kind[:-1]}{'L' if order == 'B' else 'B'}"


def depth(brightest: int) -> int:
    """How many bits a channel has whose brightest pixel this is."""
    return next(bits for bits in DEPTHS if brightest < 2**bits)


def eight_bits(picture: Image.Image) -> Image.Image:
    """A decoded picture with 8 bits a channel. Of 16 it is the upper ones of those that are used, where Pillow itself
    would cut at 255."""
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture)
        if picture.mode == "F" or values.min() < 0 or values.max() >= 2**16:
            raise ValueError(f"nobody knows how bright its pixels are (mode {picture.mode}): save it with 8 or 16 bits")
        return Image.fromarray((values >> (depth(int(values.max())) - 8)).astype(np.uint8))
    if picture.mode == "P" and "transparency" in picture.info:
        return picture.convert("RGBA")  # Pillow warns of the short way
    return picture
