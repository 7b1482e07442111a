"""Uncompressed tar archives, read where they lie. A damaged one is refused: tarfile takes the first header that it
cannot read for the end, and everything behind it would be missing in silence."""

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from linvit.errors import LinvitError
from linvit.images import check_file

ARCHIVES = (".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst")
BLOCK = 512  # bytes of a header
CHUNK = 2**20


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    start: int  # its first byte
    size: int


@dataclass
class Archive:
    """An archive read by offset, so that threads and worker processes can share it."""

    path: Path
    file: tuple[int, int] | None = None  # process and descriptor: a fork must not share the read position

    def read(self, start: int, size: int) -> bytes:
        if self.file is None or self.file[0] != os.getpid():
            self.file = (os.getpid(), os.open(self.path, os.O_RDONLY))
        found = os.pread(self.file[1], size, start)
        if len(found) < size:
            raise OSError(f"the archive is shorter than it was: {size - len(found):,} bytes are missing")
        return found

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "file": None}


def members_of(path: Path) -> list[Member]:
    """The files in an archive, of those with one name the last, as unpacking would leave it. Links within the archive
    are the files they lead to."""
    check_file(path)
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            found = list(archive)
            check_end(archive)
    except tarfile.CompressionError:
        raise LinvitError(f"{path} is compressed: unpack it, or pack it again without compression") from None
    except tarfile.TarError as error:
        hint = " (compressed archives must be unpacked first)" if path.suffix != ".tar" else "; copy or pack it again"
        raise LinvitError(f"{path} cannot be read as an archive: {error}{hint}") from None
    absolute = {member.name.startswith("/") for member in found if member.isfile()}
    if len(absolute) > 1:
        raise LinvitError(f"{path} has absolute and relative paths: pack it again from one folder")
    return [Member(name, *place) for name, place in places(found).items()]


def places(members: list[tarfile.TarInfo]) -> dict[str, tuple[int, int]]:
    """First byte and size of each file by its name."""
    found: dict[str, tuple[int, int]] = {}
    for member in members:
        name = normal(member.name)
        found.pop(name, None)
        if member.isfile():
            found[name] = (member.offset_data, member.size)
        elif member.islnk() and normal(member.linkname) in found:
            found[name] = found[normal(member.linkname)]
    for member in members:  # a symbolic link may come before its file
        target = normal(f"{os.path.dirname(member.name)}/{member.linkname}")
        if member.issym() and target in found:
            found.setdefault(normal(member.name), found[target])
    return found


def normal(name: str) -> str:
    """A path from the archive's top, without dots."""
    return os.path.normpath(f"/{name}").lstrip("/")


def check_end(archive: tarfile.TarFile) -> None:
    """Whether an archive whose headers were read was read to its end: that is a block of zeros, and there is nothing
    else behind it. Otherwise it is a ReadError, as tarfile has for what is wrong with the first header."""
    file, count = cast(Any, archive.fileobj), len(archive.getmembers())
    file.seek(archive.offset)
    first = file.read(BLOCK)
    if len(first) < BLOCK:
        raise tarfile.ReadError(f"it breaks off behind its entry {count:,}")
    while first:
        if any(first):
            raise tarfile.ReadError(f"it is damaged behind its entry {count:,}, at byte {archive.offset:,}")
        first = file.read(CHUNK)
