"""Folders that travel between machines as their files' bytes: a run's checkpoints, and teachers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from linvit.files import write

EVERY = 2.0  # seconds between two looks for new checkpoints
WEIGHTS = ".safetensors"
Files = dict[str, bytes]  # a folder's content by relative name


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder, but for those still being written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            if path.is_file() and not path.name.startswith("."):
                seen = path.stat()
                found[path.relative_to(folder).as_posix()] = (seen.st_size, seen.st_mtime_ns)
    return found


def read_files(folder: Path, names: list[str] | None = None) -> Files:
    """A folder's files; weights first, so that a log is never older than the checkpoint beside it."""
    found = {}
    for name in sorted(stamps(folder) if names is None else names, key=lambda name: not name.endswith(WEIGHTS)):
        with suppress(FileNotFoundError):
            found[name] = (folder / name).read_bytes()
    return found


def write_files(folder: Path, files: Files) -> None:
    """Put files into a folder, each whole or not at all; weights last."""
    for name in sorted(files, key=lambda name: name.endswith(WEIGHTS)):
        write(folder / name, files[name])


def keep_only(folder: Path, names: list[str]) -> None:
    """Drop the files that the worker has dropped."""
    for name in stamps(folder).keys() - set(names):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def mirrored(folder: Path, send: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Send a run's checkpoints to the driver while it goes, so that they outlive this node."""
    ended = threading.Event()
    sent = stamps(folder)

    def keep_sending() -> None:
        nonlocal sent
        while not ended.wait(EVERY):
            found = stamps(folder)
            new = [name for name in found if sent.get(name) != found[name]]
            if any(name.endswith(WEIGHTS) for name in new):
                send({"kind": "checkpoint", "names": list(found), "files": read_files(folder, new)})
                sent = found

    thread = threading.Thread(target=keep_sending, daemon=True, name="mirror")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
