"""Archives of images: a damaged one is refused, whatever of it was hit."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from linvit.errors import LinvitError
from linvit.tasks.archives import Archive, members_of
from linvit.tasks.classify.data import open_images
from linvit.tasks.dense.files import Files

NAMES = [f"train/{name}/{number}.jpg" for name in ("cat", "dog") for number in range(4)]


def pack(path: Path, *members: tarfile.TarInfo | str, **how: int) -> Path:
    """An archive in which every file holds its name a hundred times; links are given as they are."""
    with tarfile.open(path, "w", **how) as archive:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            content = info.name.encode(errors="surrogateescape") * 100 if info.isfile() else b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("how", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_flipped_bit_in_any_header_never_shortens_a_set(tmp_path: Path, how: int) -> None:
    whole = pack(tmp_path / "whole.tar", *NAMES, f"train/dog/{'x' * 120}.jpg", format=how)
    content, wanted = whole.read_bytes(), members_of(whole)
    assert [member.name for member in wanted][:-1] == NAMES
    with tarfile.open(whole) as archive:
        headers = [member.offset for member in archive]
    flipped = tmp_path / "flipped.tar"
    for header in headers:
        for place in (0, 7, 101, 124, 130, 135, 148, 153, 156, 257, 345, 500):
            damaged = bytearray(content)
            damaged[header + place] ^= 0x04
            flipped.write_bytes(damaged)
            with pytest.raises(LinvitError, match=r"flipped.tar cannot be read as an archive: .*; copy or pack"):
                members_of(flipped)


@pytest.mark.parametrize("open_it", [members_of, Files, lambda path: open_images(path, "train")])
def test_an_archive_that_breaks_off_is_refused(tmp_path: Path, open_it: object) -> None:
    content = pack(tmp_path / "whole.tar", *NAMES).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as archive:
        ends = [member.offset for member in archive][1:]
    short = tmp_path / "short.tar"
    for end in (*ends, ends[-1] + 100, ends[-1] + 512, ends[-1] + 1000):  # between two files, and in the midst of one
        short.write_bytes(content[:end])
        with pytest.raises(LinvitError, match=r"short.tar cannot be read as an archive: (it breaks off|unexpected)"):
            open_it(short)  # type: ignore[operator]


def test_two_archives_one_behind_the_other_are_not_half_read(tmp_path: Path) -> None:
    first, second = (pack(tmp_path / f"{part}.tar", *NAMES[part::2]) for part in (0, 1))
    both = tmp_path / "both.tar"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(LinvitError, match=r"both.tar .*: it is damaged behind its entry 4, at byte "):
        members_of(both)


def test_links_and_updates_are_what_unpacking_would_leave(tmp_path: Path) -> None:
    packed = pack(
        tmp_path / "set.tar",
        link("b/soft.jpg", "../a/1.jpg", tarfile.SYMTYPE),
        "a/1.jpg",
        link("a/hard.jpg", "a/1.jpg", tarfile.LNKTYPE),
        "a/2.jpg",
        "./a/2.jpg",
        link("b/nowhere.jpg", "/etc/passwd", tarfile.SYMTYPE),
    )
    members = {member.name: member for member in members_of(packed)}
    assert sorted(members) == ["a/1.jpg", "a/2.jpg", "a/hard.jpg", "b/soft.jpg"]
    assert members["a/hard.jpg"][1:] == members["a/1.jpg"][1:] == members["b/soft.jpg"][1:]
    assert Archive(packed).read(*members["a/2.jpg"][1:]).startswith(b"./a/2.jpg")


def test_absolute_paths(tmp_path: Path) -> None:
    packed = pack(tmp_path / "absolute.tar", *(f"/data/{name}" for name in NAMES))
    assert open_images(packed, "train").classes == ("cat", "dog")
    mixed = pack(tmp_path / "mixed.tar", *NAMES[:4], *(f"/data/{name}" for name in NAMES[4:]))
    for open_it in (lambda: open_images(mixed, "train"), lambda: Files(mixed)):
        with pytest.raises(LinvitError, match=r"mixed.tar has absolute and relative paths: pack it again"):
            open_it()


def test_an_archive_that_changes_under_its_reader_is_noticed(tmp_path: Path) -> None:
    packed = pack(tmp_path / "set.tar", *NAMES)
    images = open_images(packed, "train")
    os.truncate(packed, 1000)
    with pytest.raises(LinvitError, match=r"cannot read image .*dog/3.jpg: the archive is shorter than it was"):
        images[7]
