"""Image folders and archives of them, with every mistake in them found before the training starts.

timm's readers are lenient: a class folder without images vanishes, and with it the numbering of the classes; a class of
the validation set that training does not know is left out in silence. Here both are errors. The class of an image is
the first folder below the split, however deep the image lies in it; timm takes the innermost. Images that lie in no
class folder have no labels, which is for the caller to want or not; their `class_to_idx` is empty. `chosen` is the
folder of the split, None where there are no splits.
"""

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from timm.utils.misc import natural_key

from linvit.errors import LinvitError
from linvit.images import Walk, images_below, is_image
from linvit.tasks.archives import ARCHIVES, Archive, members_of

SPLITS = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "eval", "evaluation", "test")}
SPLIT_FOLDERS = {*SPLITS["train"], *SPLITS["validation"]}


@dataclass
class FileReader:
    """Images with their labels: files below `root`, or places (first byte, size) in the archive that `root` is then."""

    root: Path
    samples: list[tuple[str, int]]
    class_to_idx: dict[str, int]
    chosen: str | None
    places: list[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        self.archive = Archive(self.root)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        name, label = self.samples[index]
        if self.places is None:
            return open(name, "rb"), label
        return io.BytesIO(self.archive.read(*self.places[index])), label

    def filename(self, index: int, absolute: bool = False) -> str:
        """The name of a file, as timm's readers give it."""
        name = self.samples[index][0]
        if self.places is not None:
            return f"{self.root}:{name}" if absolute else name
        return name if absolute or not self.class_to_idx else os.path.relpath(name, self.root)

    def subset(self, indices: list[int]) -> "FileReader":
        """Some of the images."""
        places = self.places and [self.places[index] for index in indices]
        return replace(self, samples=[self.samples[index] for index in indices], chosen="", places=places)


def open_reader(path: Path, split: str, classes: dict[str, int] | None, unlabelled: bool) -> FileReader:
    """The images of a split in a folder or an archive. `classes` is the numbering that they must share; `unlabelled`,
    whether images without class folders will do."""
    if not path.exists():
        raise nothing_at(path)
    if path.is_dir():
        reader = folder_reader(path, split, classes)
    elif path.suffix in ARCHIVES:
        reader = archive_reader(path, split, classes)
    else:
        raise LinvitError(f"{path} is neither an image folder nor a .tar archive")
    if not (reader.class_to_idx or unlabelled):
        raise no_classes(path / reader.chosen if reader.chosen else path)
    return reader


def nothing_at(path: Path) -> LinvitError:
    """The error for a path that does not exist, with the nearest one that does."""
    parent = path.absolute()
    while not parent.exists():
        missing, parent = parent.name, parent.parent
    close = get_close_matches(missing, [entry.name for entry in parent.iterdir()], n=1, cutoff=0.5)
    hint = f"did you mean {parent / close[0]}?" if close else f"{parent} exists, '{missing}' in it does not"
    return LinvitError(f"no data at {path}; {hint}")


def choose_split(folders: Iterable[str], split: str, where: str) -> str | None:
    """The folder of a split; None where there are no splits at all and the folder itself is one."""
    present = set(folders)
    names = (split, *next((names for names in SPLITS.values() if split in names), ()))
    found = next((name for name in names if name in present), None)
    if found is None and present & SPLIT_FOLDERS:
        looked = ", ".join(dict.fromkeys(names))
        raise LinvitError(f"{where} has no folder for the split '{split}' (looked for {looked})")
    return found


def number_classes(
    names: Iterable[str], classes: dict[str, int] | None = None, where: object = "", deep: bool = False
) -> dict[str, int]:
    """Class names in timm's order; those that are one to it, such as `a1` and `A01`, by their letters. With `classes`
    it is theirs, which a split must share with training. `deep`: there are folders of images in the only one."""
    found = set(names)
    odd = next((name for name in sorted(found) if not name.isprintable()), None)
    if odd is not None:
        hint = "rename its folder, in letters and UTF-8"
        raise LinvitError(f"{where} has a class whose name cannot be printed ({odd!a}): {hint}")
    if deep:
        hint = f"if those are the classes, move them out of '{min(found)}', else their images"
        raise LinvitError(f"{where} has one class, '{min(found)}', with folders of images in it: {hint}")
    if classes is None:
        return {name: i for i, name in enumerate(sorted(sorted(found), key=natural_key))}
    missing, extra = (sorted(odd, key=natural_key) for odd in (classes.keys() - found, found - classes.keys()))
    if missing:
        raise LinvitError(f"{where} has no image of class '{missing[0]}'{more(missing)}, which the training set has")
    if extra:
        raise LinvitError(f"{where} has class '{extra[0]}'{more(extra)}, which the training set has not")
    return classes


def more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def folder_reader(root: Path, split: str, classes: dict[str, int] | None) -> FileReader:
    """The images of a folder, `root/split/class/*.jpg` or `root/class/*.jpg`, or without classes, `root/split/*.jpg` or
    `root/*.jpg`. As in an archive there may be a folder around all that."""
    top = innermost(root)
    chosen = choose_split((entry.name for entry in folders_in(top)), split, str(top))
    where = top / chosen if chosen else top
    within = str(where.relative_to(root)) if chosen else None
    folders, loose = folders_in(where), images_right_in(where)
    if not (folders or loose):
        hint = f"images belong in {where}/CLASS/, or right in it where they need no labels"
        raise LinvitError(f"{where} holds no image and has no class folders: {hint}")
    if not folders:
        return FileReader(root, [(file, 0) for file in sorted(images_below(where), key=natural_key)], {}, within)
    if loose:
        raise beside_classes(where, loose)
    walk = Walk([entry for entry in folders_in(top) if entry.name in SPLIT_FOLDERS] or [top])
    found = [(file, folder.name) for folder in folders for file in images_below(folder, walk)]
    present = {name for _, name in found}
    for folder in folders:
        if folder.name not in present:
            raise LinvitError(f"class folder {folder} holds no image: fill it or remove it")
    numbers = number_classes(present, classes, where, chosen in SPLITS["train"] and innermost(where) != where)
    samples = [(file, numbers[name]) for file, name in sorted(found, key=lambda row: natural_key(row[0]))]
    return FileReader(where if chosen else root, samples, numbers, within)


def folders_in(folder: Path) -> list[Path]:
    return [entry for entry in sorted(folder.iterdir()) if entry.is_dir()]


def images_right_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if is_image(entry.name) and entry.is_file()]


def innermost(root: Path) -> Path:
    """The folder that splits or classes lie in, as `shared` finds it in an archive: a folder that is alone and has
    folders of images in it is neither a split nor a class."""
    folder = root
    while True:
        folders = folders_in(folder)
        if len(folders) != 1 or folders[0].name in SPLIT_FOLDERS or images_right_in(folder):
            return folder if any(next(images_below(each), None) for each in folders) else root
        folder = folders[0]


def no_classes(where: object) -> LinvitError:
    return LinvitError(f"{where} has no class folders: images belong in {where}/CLASS/")


def beside_classes(where: object, loose: list[str]) -> LinvitError:
    first = min(loose, key=natural_key)
    count = "1 image" if len(loose) == 1 else f"{len(loose):,} images"
    hint = "move what has no class into a class folder or away, or all images out of the class folders"
    return LinvitError(f"{where} has {count} beside its class folders ({first}): {hint}")


def archive_reader(path: Path, split: str, classes: dict[str, int] | None) -> FileReader:
    """The images of an archive, `name/split/class/*.jpg` or less deep, read in place. Images right in the folder of a
    split have no labels, nor have those of an archive of one folder."""
    found = [(PurePosixPath(name), start, size) for name, start, size in members_of(path) if is_image(name)]
    if not found:
        raise LinvitError(f"{path} holds no image")
    depth = shared([name for name, *_ in found])
    chosen = choose_split({name.parts[depth] for name, *_ in found if len(name.parts) > depth + 1}, split, str(path))
    if chosen:
        found = [row for row in found if row[0].parts[depth] == chosen]
    where = f"{path} ({chosen})" if chosen else str(path)
    level = depth + bool(chosen)  # of the class in a path
    names = {name.parts[level] for name, *_ in found}
    loose = [name.name for name, *_ in found if len(name.parts) == level + 1]
    if 0 < len(loose) < len(found):
        raise beside_classes(where, loose)
    numbers: dict[str, int] = {}
    if not loose and (len(names) > 1 or chosen):
        deep = chosen in SPLITS["train"] and shared([PurePosixPath(*name.parts[level:]) for name, *_ in found]) > 0
        numbers = number_classes(names, classes, where, deep)
    found.sort(key=lambda row: natural_key(str(row[0])))
    samples = [(str(name), numbers.get(name.parts[level], 0)) for name, *_ in found]
    return FileReader(path, samples, numbers, chosen, [(start, size) for _, start, size in found])


def shared(names: list[PurePosixPath]) -> int:
    """How many folders, one in another, hold all images and are neither a split nor a class."""
    common = len(PurePosixPath(os.path.commonpath([name.parent for name in names])).parts)
    return common if any(len(name.parts) > common + 1 for name in names) else 0
