"""A store on its way: packed into one archive, read from there, and merged with what other machines did.

Packing the same files gives the same bytes, whenever and by whomever. Merging adds, it never takes away. Results are
files of their own, so a merge is a union: it may be done twice or in any order. When both sides have a result of the
same key, the older one stays in its place and the other goes to `repeats/`.
"""

import gzip
import hashlib
import lzma
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from linvit.comparison.files import parse_object, parse_result
from linvit.comparison.results import KEY, AnyResult
from linvit.comparison.scheduling.store import FOLDERS, LOCK, Store, abandoned, set_aside
from linvit.errors import LinvitError, Unwritable, reason
from linvit.files import (
    create,
    is_full,
    locked,
    read_json,
    sha256,
    temporary,
    temporary_folder,
    to_json,
    write,
    writing,
)
from linvit.tasks.archives import check_end

RESULTS = (*FOLDERS, "comparisons")
REPEAT = re.compile(r"(runs|speeds)-(.+)-[0-9a-f]{16}\.json")
LARGEST = 2**24  # bytes of a result file
MOST, SWELLING = 2**26, 64  # bytes that an archive may hold, and so many times its own size beyond: stores have 40
DIGESTS = "digests.json"  # of all files in an archive, its last one
BROKEN = (tarfile.TarError, EOFError, OSError, lzma.LZMAError)


class PackedStore:
    """A packed store that is read where it is. Nothing is unpacked, and only so much is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def results(self) -> Iterator[AnyResult]:
        for folder, name, content in sorted(self.files(), key=lambda file: (FOLDERS.index(file[0]), file[1])):
            try:
                yield parse_result(content, name)
            except LinvitError as error:
                self.notes.append(f"{folder}/{name} was left aside: {error}")

    def files(self) -> Iterator[tuple[str, str, bytes]]:
        """Folder, name and content of each result file."""
        left = most = room(self.path)
        try:
            with tarfile.open(self.path) as archive:
                for member in archive:
                    folder, name = ("", *PurePosixPath(member.name).parts)[-2:]
                    if not member.isfile() or folder not in FOLDERS or not re.fullmatch(r"[^.].*\.json", name):
                        continue
                    left -= member.size
                    if member.size > LARGEST or left < 0:
                        raise LinvitError(f"{self.path} holds more than a store's results could be: not read")
                    yield folder, name, cast(IO[bytes], archive.extractfile(member)).read()
                check_end(archive)
        except BROKEN as error:
            if left == most:
                raise LinvitError(
                    f"{self.path} is no archive of a store ({error}): give one made with --pack"
                ) from None
            self.notes.append(f"{self.path.name} cannot be read to its end ({error})")


def room(path: Path) -> int:
    """How many bytes an archive may hold without being one that was made to fill a disk."""
    return MOST + SWELLING * path.stat().st_size


def open_store(path: str | Path) -> Store | PackedStore:
    """A store to read from: its folder, or an archive of it."""
    path = Path(path)
    if not path.exists():
        raise LinvitError(f"no store {path}: give the folder that `linvit compare -o` wrote, or an archive of it")
    return Store(path) if path.is_dir() else PackedStore(path)


def store_name(path: Path) -> str:
    """What a store is called, packed or not."""
    return re.sub(r"\.(tar(\.(gz|xz))?|tgz)$", "", path.resolve().name)


def pack(store: Store, archive: Path, *, work: bool = False) -> int:
    """Write the store into one archive (.tar, .tar.gz or, smallest, .tar.xz), with `work` also the checkpoints of runs
    that are under way; how many files it holds. The store may be written to meanwhile."""
    digests: dict[str, str] = {}
    top = PurePosixPath(store_name(store.folder))
    with ExitStack() as stack:
        plain = stack.enter_context(open(stack.enter_context(temporary(archive)), "wb"))
        out = stack.enter_context(compressed(plain, archive.suffix))
        file = stack.enter_context(tarfile.open(None, "w", out))
        for path in belongings(store, work):
            name = path.relative_to(store.folder).as_posix()
            with suppress(FileNotFoundError), open(path, "rb") as source:  # a checkpoint may be replaced this moment
                hashing: Any = Hashing(source)
                file.addfile(anonymous(file.gettarinfo(arcname=str(top / name), fileobj=source)), hashing)
                digests[name] = hashing.found.hexdigest()
        content = to_json(digests).encode()
        last = tarfile.TarInfo(str(top / DIGESTS))
        last.size = len(content)
        file.addfile(anonymous(last), BytesIO(content))
    return len(digests)


class Hashing:
    """A file that is read once, and its digest."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.found = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        content = self.file.read(size)
        self.found.update(content)
        return content


def compressed(file: IO[bytes], suffix: str) -> Any:
    """What compresses on the way to a file, by the archive's suffix."""
    if suffix in (".gz", ".tgz"):
        return gzip.GzipFile("", "wb", 9, file, mtime=0)
    return lzma.open(file, "wb", preset=9) if suffix in (".xz", ".txz") else nullcontext(file)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file without its time and its owner."""
    return member.replace(mtime=0, uid=0, gid=0, uname="", gname="", mode=0o644, deep=False)


def belongings(store: Store, work: bool) -> Iterator[Path]:
    """The files that travel: all results, the teachers that are done, and the work if it is asked for."""
    for name in (*RESULTS, "repeats"):
        yield from sorted((store.folder / name).glob("[!.]*.json"))
    folders = [path for path in sorted(store.folder.glob("teachers/*")) if store.trained(path.name)]
    folders += [path for path in sorted(store.folder.glob("work/*")) if work and not store.trained(path.name)]
    for folder in folders:
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def merge(store: Store, other: Path) -> dict[str, int]:
    """Add what another store, a folder or an archive, has; how much of each kind was new. What is damaged or not ours
    is left aside and noted."""
    if other.is_dir():
        return merge_folder(store, root_of(other))
    if not other.is_file():
        raise LinvitError(f"there is no store at {other}: give a store's folder, or an archive made with --pack")
    store.folder.mkdir(parents=True, exist_ok=True)
    store.clear()
    with temporary_folder(store.folder) as folder:
        try:
            unpack(other, folder)
        except BROKEN as error:
            if is_full(error):
                raise Unwritable(f"cannot merge {other} into {store.folder}: {reason(error)}") from None
            store.note(f"{other} cannot be read to its end ({error}): what came before that is merged")
        found = root_of(folder)
        drop_damaged(store, found)
        return merge_folder(store, found)


def unpack(path: Path, folder: Path) -> None:
    """Expand the files of an archive, if they are no more than a store's could be."""
    left = room(path)
    with tarfile.open(path) as archive:
        for member in filter(tarfile.TarInfo.isfile, archive):
            left -= tarfile.BLOCKSIZE + member.size  # a file that is empty is not for nothing
            if left < 0 or (member.name.endswith(".json") and member.size > LARGEST):
                raise LinvitError(f"{path} holds more than a store could: not merged")
            archive.extract(member, folder, filter="data")
        check_end(archive)


def drop_damaged(store: Store, other: Path) -> None:
    """Take out of an archive's files what is not as it was packed, a teacher or a run under way as a whole."""
    digests = read_json(other / DIGESTS)
    for name, wanted in digests.items() if isinstance(digests, dict) else ():
        path = other / name
        if not path.is_file() or sha256(path).hex() == wanted:
            continue
        store.note(f"{name} was not merged: it is damaged, its digest is wrong")
        folder, *inner = PurePosixPath(name).parts
        if folder in ("teachers", "work"):
            shutil.rmtree(other / folder / inner[0])
        else:
            path.unlink()


def root_of(folder: Path) -> Path:
    """The store in a folder: the folder itself, or the one folder in it."""
    for candidate in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if any((candidate / name).is_dir() for name in RESULTS):
            return candidate
    raise LinvitError(f"{folder} holds no store: no folder {', '.join(RESULTS)} in it")


def merge_folder(store: Store, other: Path) -> dict[str, int]:
    theirs = Store(other)
    added = dict.fromkeys((*RESULTS, "repeats", "teachers", "work"), 0)
    for folder in RESULTS:
        for path in sorted((other / folder).glob("[!.]*.json")):
            added[folder] += adopt(store, folder, path.name, path)
    for path in sorted((other / "repeats").glob("[!.]*.json")):
        named = REPEAT.fullmatch(path.name)
        if named:
            added["repeats"] += adopt(store, named[1], f"{named[2]}.json", path)
    for path in sorted(other.glob("teachers/*")):
        if KEY.fullmatch(path.name) and theirs.trained(path.name):
            added["teachers"] += copy_folder(path, store.teacher_folder(path.name))
    for path in sorted(other.glob("work/*")):
        claim = store.folder / "claims" / path.name
        busy = claim.exists() and not abandoned(claim, store.stale)
        if KEY.fullmatch(path.name) and not store.trained(path.name) and not busy:
            added["work"] += copy_folder(path, store.work_folder(path.name))
    return added


def adopt(store: Store, folder: str, name: str, path: Path) -> bool:
    """Take one file over; whether it was new."""
    try:
        if path.stat().st_size > LARGEST:
            raise LinvitError("it is larger than a result could be")
        content = path.read_bytes()
        parse_object(content) if folder == "comparisons" else parse_result(content, name)
    except LinvitError as error:
        store.note(f"{path.name} of {folder} was not merged: {error}")
        return False
    target = store.folder / folder / name
    store.folder.mkdir(parents=True, exist_ok=True)
    with locked(store.folder / LOCK):
        if create(target, content):
            return True
        ours = target.read_bytes()
        if ours == content or folder == "comparisons":
            return False
        if store.read(target) is None:
            set_aside(target)
            return create(target, content)
        first, second = sorted((ours, content), key=age)
        repeat = f"{folder}-{name.removesuffix('.json')}-{hashlib.sha256(second).hexdigest()[:16]}.json"
        new = create(store.folder / "repeats" / repeat, second)
        if first == content:
            write(target, content)
            return True
        return new


def age(content: bytes) -> tuple[str, str]:
    """When a result was made; of the same second the digest decides, so that every machine decides alike."""
    return str(parse_object(content).get("environment", {}).get("time")), hashlib.sha256(content).hexdigest()


def copy_folder(source: Path, target: Path) -> bool:
    """Copy a folder whole or not at all, unless there is one."""
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target.parent) as beside:
        with writing(target):
            copied = shutil.copytree(source, beside / target.name)
        try:
            copied.rename(target)
        except OSError:
            if not target.exists():
                raise
            return False
    return True
