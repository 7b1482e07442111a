"""A run has its folder to itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from linvit.errors import LinvitError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PATIENCE = 10.0  # seconds


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Nobody else trains into the folder meanwhile. The workers of a killed run outlive it a little: wait for them."""
    if folder is None or fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle, until = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    reason = f"another process trains into {folder}"
                    raise LinvitError(f"{reason}: wait for it, or give another folder") from None
                time.sleep(0.1)
            except OSError:  # a disk that has no locks
                yield
                return
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where workers were forked
    finally:
        os.close(handle)
