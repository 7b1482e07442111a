"""Image folders and archives of them, with every mistake in them found before the training starts.

timm's readers are lenient: a class folder without images vanishes, and with it the numbering of the classes; a class of
the validation set that training does not know is left out in silence. Here both are errors. The class of an image is
the first folder below the split, however deep the image lies in it; timm takes the innermost. Images that lie in no
class folder have no labels, which is for the caller to want or not; their `class_to_idx` is empty. `chosen` is the
folder of the split, None where there are no splits.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from timm.data.readers.img_extensions import get_img_extensions, is_img_extension
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.utils.misc import natural_key

from linvit.errors import LinvitError

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "eval", "evaluation", "test"),
}
SPLIT_FOLDERS = frozenset(name for names in SPLITS.values() for name in names)
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"))


def is_image(name: str) -> bool:
    """Whether a file is a picture by its suffix: one of ours, or one that timm was told of."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix in SUFFIXES or is_img_extension(suffix)


def split_names(split: str) -> tuple[str, ...]:
    """The folder names a split may have, the one asked for first."""
    for names in SPLITS.values():
        if split in names:
            return (split, *(name for name in names if name != split))
    return (split,)


def choose_split(folders: Iterable[str], split: str, where: str) -> str | None:
    """The folder of a split; None where there are no splits at all and the folder itself is one."""
    present = set(folders)
    found = next((name for name in split_names(split) if name in present), None)
    if found is None and present & SPLIT_FOLDERS:
        raise LinvitError(f"{where} has no folder for the split '{split}' (looked for {', '.join(split_names(split))})")
    return found


def check_path(path: Path) -> None:
    """A path that exists, or an error with the nearest one that does."""
    if path.exists():
        return
    parent = path.absolute()
    while not parent.exists():
        missing, parent = parent.name, parent.parent
    close = get_close_matches(missing, [entry.name for entry in parent.iterdir()], n=1, cutoff=0.5)
    hint = f"did you mean {parent / close[0]}?" if close else f"{parent} exists, '{missing}' in it does not"
    raise LinvitError(f"no data at {path}; {hint}")


def number_classes(names: Iterable[str]) -> dict[str, int]:
    """Class names in timm's order; those that are one to it, such as `a1` and `A01`, by their letters."""
    return {name: i for i, name in enumerate(sorted(sorted(set(names)), key=natural_key))}


def check_classes(found: set[str], classes: dict[str, int] | None, where: str) -> None:
    """Whether a split has the classes that training has."""
    if classes is None:
        return
    missing = sorted(classes.keys() - found, key=natural_key)
    if missing:
        raise LinvitError(f"{where} has no image of class '{missing[0]}'{more(missing)}, which the training set has")
    extra = sorted(found - classes.keys(), key=natural_key)
    if extra:
        raise LinvitError(f"{where} has class '{extra[0]}'{more(extra)}, which the training set has not")


def more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def folder_reader(root: Path, split: str, classes: dict[str, int] | None) -> Reader:
    """timm's reader of an image folder, `root/split/class/*.jpg` or `root/class/*.jpg`, or one of images without
    classes, `root/split/*.jpg` or `root/*.jpg`. As in an archive there may be a folder around all that."""
    top = innermost(root)
    chosen = choose_split((entry.name for entry in folders_in(top)), split, str(top))
    where = top / chosen if chosen else top
    within = str(where.relative_to(root)) if chosen else None
    folders, loose = folders_in(where), images_right_in(where)
    if not folders:
        if not loose:
            raise no_classes(where)
        return LooseReader(sorted(loose, key=lambda entry: natural_key(entry.name)), within)
    if loose:
        raise beside_classes(where, [entry.name for entry in loose])
    for folder in folders:
        if not holds_image(folder):
            raise LinvitError(f"class folder {folder} holds no image: fill it or remove it")
    if chosen in SPLITS["train"] and innermost(where) != where:
        raise too_deep(where, folders[0].name)
    reader: Any = ReaderImageFolder(str(where), input_key=";".join(SUFFIXES.union(get_img_extensions())))
    start = len(os.path.join(where, ""))
    names = [file[start:].split(os.sep, 1)[0] for file, _ in reader.samples]
    check_classes(set(names), classes, str(where))
    reader.class_to_idx = classes or number_classes(names)
    reader.samples = [(file, reader.class_to_idx[name]) for (file, _), name in zip(reader.samples, names, strict=True)]
    reader.root, reader.chosen = str(where if chosen else root), within
    return reader


def folders_in(folder: Path) -> list[Path]:
    return [entry for entry in sorted(folder.iterdir()) if entry.is_dir()]


def images_right_in(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if is_image(entry.name) and entry.is_file()]


def holds_image(folder: Path) -> bool:
    """Whether there is an image in a folder or anywhere below it."""
    return any(is_image(name) for _, _, names in os.walk(folder, followlinks=True) for name in names)


def innermost(root: Path) -> Path:
    """The folder that splits or classes lie in, as `shared` finds it in an archive: a folder that is alone and has
    folders of images in it is neither a split nor a class."""
    folder = root
    while True:
        folders = folders_in(folder)
        if len(folders) != 1 or folders[0].name in SPLIT_FOLDERS or images_right_in(folder):
            return folder if any(map(holds_image, folders)) else root
        folder = folders[0]


def no_classes(where: object) -> LinvitError:
    return LinvitError(f"{where} has no class folders: images belong in {where}/CLASS/")


def too_deep(where: object, only: str) -> LinvitError:
    return LinvitError(
        f"{where} has one class, '{only}', with folders of images in it: if those are the classes, move them out of "
        f"'{only}', else their images"
    )


def beside_classes(where: object, loose: list[str]) -> LinvitError:
    first = min(loose, key=natural_key)
    count = "1 image" if len(loose) == 1 else f"{len(loose):,} images"
    return LinvitError(
        f"{where} has {count} beside its class folders ({first}): move what has no class into a class folder or away, "
        "or all images out of the class folders"
    )


class LooseReader(Reader):
    """Images of one folder, without labels."""

    def __init__(self, files: list[Path], chosen: str | None) -> None:
        super().__init__()
        self.class_to_idx: dict[str, int] = {}
        self.samples = [(str(file), 0) for file in files]
        self.chosen = chosen

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return open(self.samples[index][0], "rb"), 0

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        name = self.samples[index][0]
        return os.path.basename(name) if basename else name


class Subset(Reader):
    """Some of a reader's images."""

    def __init__(self, whole: Any, indices: list[int]) -> None:
        super().__init__()
        self.whole, self.indices, self.class_to_idx = whole, indices, whole.class_to_idx
        self.samples = [whole.samples[index] for index in indices]
        places = getattr(whole, "places", None)
        self.places = places and [places[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.whole[self.indices[index]]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return str(self.whole.filename(self.indices[index], basename, absolute))


class TarReader(Reader):
    """An archive of an image folder, `name/split/class/*.jpg` or less deep, read in place. Images right in the folder
    of a split have no labels, nor have those of an archive of one folder.

    timm's own tar reader makes one class of each innermost folder, over all splits. This one reads by offset, so that
    threads and worker processes can share it.
    """

    def __init__(self, path: Path, split: str, classes: dict[str, int] | None = None) -> None:
        super().__init__()
        self.path = path
        found = [(PurePosixPath(name), start, size) for name, start, size in images_in(path)]
        if not found:
            raise LinvitError(f"{path} holds no image")
        depth = shared([name for name, *_ in found])
        folders = {name.parts[depth] for name, *_ in found if len(name.parts) > depth + 1}
        self.chosen = chosen = choose_split(folders, split, str(path))
        if chosen:
            found = [row for row in found if row[0].parts[depth] == chosen]
        where = f"{path} ({chosen})" if chosen else str(path)
        level = depth + bool(chosen)  # of the class in a path
        names = {name.parts[level] for name, *_ in found}
        loose = [name.name for name, *_ in found if len(name.parts) == level + 1]
        if 0 < len(loose) < len(found):
            raise beside_classes(where, loose)
        if loose or (len(names) == 1 and not chosen):
            self.class_to_idx: dict[str, int] = {}
        else:
            if chosen in SPLITS["train"] and shared([PurePosixPath(*name.parts[level:]) for name, *_ in found]):
                raise too_deep(where, min(names))
            check_classes(names, classes, where)
            self.class_to_idx = classes or number_classes(names)
        found.sort(key=lambda row: natural_key(str(row[0])))
        self.samples = [(str(name), self.class_to_idx.get(name.parts[level], 0)) for name, *_ in found]
        self.places = [(start, size) for _, start, size in found]
        self.file: tuple[int, int] | None = None  # process and descriptor: a fork must not share the read position

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        if self.file is None or self.file[0] != os.getpid():
            self.file = (os.getpid(), os.open(self.path, os.O_RDONLY))
        start, size = self.places[index]
        return io.BytesIO(os.pread(self.file[1], size, start)), self.samples[index][1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "file": None}

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        name = self.samples[index][0]
        return os.path.basename(name) if basename else f"{self.path}:{name}" if absolute else name


def shared(names: list[PurePosixPath]) -> int:
    """How many folders, one in another, hold all images and are neither a split nor a class."""
    common = len(PurePosixPath(os.path.commonpath([name.parent for name in names])).parts)
    return common if any(len(name.parts) > common + 1 for name in names) else 0


def images_in(path: Path) -> list[tuple[str, int, int]]:
    """The images of an uncompressed archive: name, first byte, size."""
    try:
        with tarfile.open(path, "r:") as archive:
            members = [member for member in archive if member.isfile()]
    except tarfile.CompressionError:
        raise LinvitError(f"{path} is compressed: unpack it, or pack it again without compression") from None
    except tarfile.TarError as error:
        hint = " (compressed archives must be unpacked first)" if path.suffix != ".tar" else ""
        raise LinvitError(f"{path} cannot be read as an archive: {error}{hint}") from None
    names = [(member.name.removeprefix("./"), member) for member in members]
    return [(n, m.offset_data, m.size) for n, m in names if is_image(n)]
