"""Files that are whole or not there: atomic writes, locks and digests. Nothing else in linvit renames, syncs or locks.

A file is written beside its place, flushed to the disk and renamed, so that a reader, or a crash, never meets half of
it. What a killed process left beside its place begins with a dot, and no reader looks at those.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from linvit.errors import LinvitError, Unwritable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".writing-"  # what temporary files' names begin with
OWNER = re.compile(rf"{re.escape(TEMPORARY)}(\d+)-([0-9a-f]{{8}})-")  # and their process and machine
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # a disk that takes no more
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # a file system without hard links, as on some cloud drives


def place(path: str | Path) -> Path:
    """Where something is to be written. An empty name is a mistake, often a shell variable that is not set."""
    if not str(path).strip():
        raise LinvitError("an empty path names no place to write to: give one, or . for this folder")
    return Path(path)


@contextmanager
def temporary(path: Path, *, exclusive: bool = False) -> Iterator[Path]:
    """A path beside `path` to write to; when the block ends well, the file is synced and takes the place of `path`.
    With `exclusive` a file that is there already stays, and FileExistsError is raised."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=own_prefix(), dir=path.parent)
        os.close(handle)
        beside = Path(name)
        try:
            yield beside
            sync(beside)
            beside.chmod(0o666 & ~umask())
            if exclusive:
                link(beside, path)
            else:
                os.replace(beside, path)
            sync_folder(path.parent)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """What keeps a file or folder from being written, in one line."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise Unwritable(f"cannot write {path}: {error.strerror or error}") from error


def is_full(error: BaseException) -> bool:
    """Whether an error comes from the disk and not from what was to be written there."""
    return isinstance(error, Unwritable) or (isinstance(error, OSError) and error.errno in FULL)


def link(beside: Path, path: Path) -> None:
    """Give a file its name unless that is taken; without hard links there is a moment in which two may think so."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
        os.replace(beside, path)


def write(path: Path, content: bytes | str) -> None:
    """Write a file whole, in the place of what was there."""
    with temporary(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def create(path: Path, content: bytes | str) -> bool:
    """Write a file unless there is one; whether it was written. Of two writers the first one's stays."""
    try:
        with temporary(path, exclusive=True) as beside:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
    except FileExistsError:
        return False
    return True


def to_json(data: Any) -> str:
    """Data as the text of a JSON file. NaN and infinity are a ValueError: other programs cannot read them."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    write(path, to_json(data))


def read_json(path: Path) -> Any:
    """What a JSON file holds, or None where there is none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_folder(folder: Path, files: Mapping[str, Callable[[str], object]]) -> None:
    """Write a folder's files, each by its function of a path, and move them in when all are there."""
    if folder.is_file():
        raise LinvitError(f"{folder} is a file: give a folder")
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_temporary(folder)
        with temporary_folder(folder) as beside:
            for name, write_to in files.items():
                path = beside / name
                write_to(str(path))
                path.chmod(0o666 & ~umask())  # safetensors' files are for their owner only
            move_in(beside, folder, list(files)[-1])
    except BaseException as error:
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        if isinstance(error, OSError):
            raise Unwritable(f"cannot write {folder}: {error}") from error
        raise


def move_in(source: Path, folder: Path, last: str) -> None:
    """Move what lies in one folder into another. The file `last` comes last, and the one that was there goes before the
    first new one comes: where it is, the others are whole, and the folder never mixes two saves."""
    for path in source.rglob("*"):
        if path.is_file():
            sync(path)
    (folder / last).unlink(missing_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == last):
        there = folder / path.name
        if path.is_dir() and there.is_dir():
            shutil.rmtree(there)
        os.replace(path, there)
    sync_folder(folder)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder for the time being, in one that exists."""
    with tempfile.TemporaryDirectory(prefix=own_prefix(), dir=parent) as folder:
        yield Path(folder)


def own_prefix() -> str:
    """What the temporary files of this process begin with, which tells whether it still lives."""
    return f"{TEMPORARY}{os.getpid()}-{hashlib.sha256(host().encode()).hexdigest()[:8]}-"


def clear_temporary(*folders: Path) -> None:
    """Remove what killed processes left half written right in these folders, which others may remove meanwhile. What
    another machine writes is left alone for a day."""
    for folder in folders:
        left: list[Path] = []
        with suppress(OSError):
            left = [folder / name for name in os.listdir(folder) if name.startswith(TEMPORARY)]
        for path in left:
            with suppress(OSError):
                if is_left(path):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_left(path: Path) -> bool:
    """Whether nobody writes to this temporary file any more."""
    named = OWNER.match(path.name)
    if named is None:
        return True
    if own_prefix().endswith(f"-{named[2]}-"):  # of this machine
        return not process(int(named[1]))
    return time.time() - path.stat().st_mtime > 24 * 3600


def host() -> str:
    """This machine since its start, and the container: where process numbers mean the same."""
    name = socket.gethostname()
    with suppress(OSError):
        name += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        name += " " + os.readlink("/proc/self/ns/pid")
    return name


def process(pid: int) -> dict[str, Any]:
    """A living process with its start, as numbers are used again; empty for a dead one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return {} if stat[0] in ("Z", "X") else {"pid": pid, "started": int(stat[19])}
    except OSError:
        if Path("/proc/self/stat").exists():
            return {}
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return {}
    except PermissionError:
        pass
    return {"pid": pid, "started": None}


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Make a file's content last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make a folder's names last as well, where the file system can."""
    with suppress(OSError):
        sync(folder)


@contextmanager
def locked(path: Path, *, wait: float | None = None, busy: str = "", shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file or folder, alone or with others who share it. Without `wait`, as long as it takes; with
    it, `busy` is the error after so many seconds. Where the file system has no locks, go on without."""
    if fcntl is None:
        yield
        return
    new = 0 if path.exists() else os.O_CREAT  # some systems refuse it for another user's file
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | new, 0o666)
    try:
        acquire(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait, busy)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where workers were forked
    finally:
        os.close(handle)


def acquire(handle: int, kind: int, wait: float | None, busy: str) -> None:
    until = None if wait is None else time.monotonic() + wait
    while True:
        try:
            fcntl.flock(handle, kind if until is None else kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if until is not None and time.monotonic() > until:
                raise LinvitError(busy) from None
            time.sleep(0.1)
        except OSError:
            return


def sha256(path: Path) -> bytes:
    """The digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
