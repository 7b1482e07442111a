"""The files of a set by their names, whether they lie in a folder or in an archive that is read where it lies."""

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from linvit.errors import LinvitError
from linvit.images import Walk, check_file
from linvit.tasks.archives import ARCHIVES, Archive, members_of
from linvit.tasks.classify.readers import nothing_at


class Listing(NamedTuple):
    """The names right in a folder."""

    files: set[str]
    folders: set[str]


class Files:
    """What lies below a folder or in an archive. Names are relative to it, with slashes; hidden ones do not count."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.listings: dict[str, Listing] = {}
        self.places: dict[str, tuple[int, int]] = {}  # of an archive: first byte and size of each file
        self.archive: Archive | None = None
        if not self.path.exists():
            raise nothing_at(self.path)
        if self.path.is_dir():
            return
        if self.path.suffix not in ARCHIVES:
            raise LinvitError(f"{path} is neither a folder nor a .tar archive, nor COCO's .json")
        self.archive = Archive(self.path)
        for member in members_of(self.path):
            name = PurePosixPath(member.name)
            self.places[member.name] = (member.start, member.size)
            self.listing(str(name.parent)).files.add(name.name)
            for inner, outer in zip(name.parents, name.parents[1:], strict=False):
                self.listing(str(outer)).folders.add(inner.name)

    def listing(self, folder: str = ".") -> Listing:
        """What lies right in a folder; nothing where there is none."""
        folder = os.path.normpath(folder)
        if folder not in self.listings:
            self.listings[folder] = self.scan(folder) if self.archive is None else Listing(set(), set())
        return self.listings[folder]

    def scan(self, folder: str) -> Listing:
        where, found = self.path / folder, Listing(set(), set())
        for entry in os.scandir(where) if where.is_dir() else ():
            if not entry.name.startswith("."):
                (found.folders if entry.is_dir() else found.files).add(entry.name)
        return found

    def below(self, folder: str) -> Iterator[str]:
        """The names of all files in a folder and its folders."""
        walk, folders = Walk(), [folder]
        while folders:
            current = folders.pop()
            if self.archive is None:
                walk.enter(str(self.path / current), str(self.path / folder))
            found = self.listing(current)
            yield from (join(current, name) for name in sorted(found.files) if not name.startswith("."))
            folders += [join(current, name) for name in sorted(found.folders, reverse=True)]

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        folder, _, file = os.path.normpath(name).rpartition("/")
        return file in self.listing(folder or ("/" if name.startswith("/") else ".")).files

    def read(self, name: str) -> bytes:
        if self.archive is not None:
            return self.archive.read(*self.places[os.path.normpath(name)])
        try:
            check_file(self.path / name)
            return (self.path / name).read_bytes()
        except OSError as error:
            raise LinvitError(f"cannot read {self.full(name)}: {error.strerror}") from None

    def size(self, name: str) -> int:
        """How many bytes a file has."""
        return (self.path / name).stat().st_size if self.archive is None else self.places[os.path.normpath(name)][1]

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise LinvitError(f"{self.full(name)} is no text: save it in UTF-8") from None

    def json(self, name: str) -> Any:
        try:
            return json.loads(self.text(name))
        except json.JSONDecodeError as error:
            raise LinvitError(f"{self.full(name)} is not JSON: {error}") from None

    def full(self, name: str) -> str:
        """A file's name for a message."""
        return str(self.path / name) if self.archive is None else f"{self.path}:{name}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listings": {}} if self.archive is None else self.__dict__


def join(folder: str, name: str) -> str:
    return os.path.normpath(f"{folder}/{name}")
