"""A store on its way: packed into one archive, and merged with what other machines did.

Merging adds, it never takes away. Results are files of their own, so a merge is a union: it may be done twice or in any
order. When both sides have a result of the same key, the older one stays in its place and the other goes to `repeats/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linvit.comparison.claims import abandoned, locked
from linvit.comparison.store import KEY, Store, place, read_json, valid
from linvit.errors import LinvitError

RESULTS = ("runs", "speeds", "failures", "comparisons")
REPEAT = re.compile(r"(runs|speeds)-(.+)-[0-9a-f]{16}\.json")


def pack(store: Store, archive: Path, *, work: bool = False) -> int:
    """Write the store into one archive (.tar, or .tar.gz by its name), with `work` also the checkpoints of runs that
    are under way; how many files it holds. The store may be written to meanwhile."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    packed = 0
    handle, temporary = tempfile.mkstemp(prefix=".", dir=archive.parent)
    os.close(handle)
    try:
        with tarfile.open(temporary, "w:gz" if archive.suffix in (".gz", ".tgz") else "w") as file:
            for path in belongings(store, work):
                try:
                    file.add(path, Path(store.folder.resolve().name) / path.relative_to(store.folder))
                    packed += 1
                except FileNotFoundError:  # a checkpoint that was replaced this moment
                    continue
        os.chmod(temporary, 0o644)
        os.replace(temporary, archive)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return packed


def belongings(store: Store, work: bool) -> Iterator[Path]:
    """The files that travel: all results, the teachers that are done, and the work if it is asked for."""
    for name in (*RESULTS, "repeats"):
        yield from sorted((store.folder / name).glob("[!.]*.json"))
    folders = [path for path in sorted(store.folder.glob("teachers/*")) if finished(store, path.name)]
    folders += [path for path in sorted(store.folder.glob("work/*")) if work and not finished(store, path.name)]
    for folder in folders:
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def finished(store: Store, key: str) -> bool:
    return store.read(store.folder / "runs" / f"{key}.json") is not None


def merge(store: Store, other: Path, *, work: bool = True) -> dict[str, int]:
    """Add what another store, a folder or an archive, has; how much of each kind was new. What is damaged or not ours
    is left aside and noted."""
    if other.is_dir():
        return merge_folder(store, root_of(other), work)
    if not other.is_file():
        raise LinvitError(f"there is no store at {other}: give a store's folder, or an archive made with --pack")
    store.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merging-", dir=store.folder) as folder:
        try:
            with tarfile.open(other) as archive:
                archive.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            store.note(f"{other} cannot be read to its end ({error}): what came before that is merged")
        return merge_folder(store, root_of(Path(folder)), work)


def root_of(folder: Path) -> Path:
    """The store in a folder: the folder itself, or the one folder in it."""
    for candidate in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if any((candidate / name).is_dir() for name in RESULTS):
            return candidate
    raise LinvitError(f"{folder} holds no store: no folder {', '.join(RESULTS)} in it")


def merge_folder(store: Store, other: Path, work: bool) -> dict[str, int]:
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
        if KEY.fullmatch(path.name) and finished(theirs, path.name):
            added["teachers"] += copy_folder(path, store.teacher_folder(path.name))
    for path in sorted(other.glob("work/*")) if work else ():
        claim = store.folder / "claims" / path.name
        busy = claim.exists() and not abandoned(claim, store.stale)
        if KEY.fullmatch(path.name) and not finished(store, path.name) and not busy:
            added["work"] += copy_folder(path, store.work_folder(path.name))
    return added


def adopt(store: Store, folder: str, name: str, path: Path) -> bool:
    """Take one file over; whether it was new."""
    content = path.read_bytes()
    data = read_json(path)
    if not isinstance(data, dict) or not (folder == "comparisons" or valid(data, Path(name))):
        store.note(f"{path.name} of {folder} is damaged or no result file: not merged")
        return False
    target = store.folder / folder / name
    store.folder.mkdir(parents=True, exist_ok=True)
    with locked(store.folder):
        if place(target, content):
            return True
        ours = target.read_bytes()
        if ours == content or folder == "comparisons":
            return False
        if store.read(target) is None:
            os.replace(target, target.with_name(f"{name}.damaged-{os.getpid()}"))
            return place(target, content)
        first, second = sorted((ours, content), key=age)
        repeat = f"{folder}-{name.removesuffix('.json')}-{hashlib.sha256(second).hexdigest()[:16]}.json"
        new = place(store.folder / "repeats" / repeat, second)
        if first == content:
            beside = target.with_name(f".{name}.new")
            beside.unlink(missing_ok=True)
            place(beside, content)
            os.replace(beside, target)
            return True
        return new


def age(content: bytes) -> tuple[str, str]:
    """When a result was made; of the same second the digest decides, so that every machine decides alike."""
    data: Any = json.loads(content)
    return str(data.get("environment", {}).get("time")), hashlib.sha256(content).hexdigest()


def copy_folder(source: Path, target: Path) -> bool:
    """Copy a folder whole or not at all, unless there is one."""
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    try:
        shutil.copytree(source, beside, dirs_exist_ok=True)
        beside.chmod(0o755)
        os.rename(beside, target)
    except OSError:
        if not target.exists():
            raise
        return False
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return True
