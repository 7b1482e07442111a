"""Who works on what: a claim is a small file that one process holds and keeps fresh.

A claim is linked into place, so of two processes one gets it. It is touched every 15 seconds. When its process is
dead (same machine), or it was not touched for two minutes (another machine), somebody else may take it over. Taking
over and giving back happen under a file lock, which the system releases when a process dies.

On a network file system: `link` and `flock` are needed, which NFSv4 has. Ages are told by the file server's
clock alone, so clocks of the machines may differ. Attributes may be cached for a minute, hence the two minutes. Where
there are no locks, two processes may take over the same stale claim; then both work, and one result is kept.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from linvit.files import create, locked, read_json

BEAT = 15.0  # seconds between two touches
STALE = 120.0  # seconds without a touch after which a claim is anybody's
LOCK = ".lock"  # beside the claims


class ClaimLost(Exception):
    """Another process took the claim over, because this one slept too long."""


class Claim:
    """A held claim. As a context it is given back at the end; `check` raises when it was lost on the way."""

    def __init__(self, path: Path, token: str, beat: float = BEAT) -> None:
        self.path, self.token = path, token
        self.lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, args=(beat,), daemon=True, name=f"claim {path.name}")
        self._thread.start()

    def _keep_fresh(self, beat: float) -> None:
        while not self._ended.wait(beat):
            with suppress(OSError):
                if holder(self.path).get("token") == self.token:
                    os.utime(self.path)
                else:
                    self.lost = True
                    return

    def check(self) -> None:
        if self.lost:
            raise ClaimLost(f"{self.path.name} was taken over by another process")

    def release(self) -> None:
        self._ended.set()
        with suppress(OSError), locked(self.path.parent / LOCK):
            if holder(self.path).get("token") == self.token:
                self.path.unlink()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take(path: Path, beat: float = BEAT, stale: float = STALE) -> Claim | None:
    """Claim what `path` stands for, unless somebody alive holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    with locked(path.parent / LOCK):
        if path.exists():
            if not abandoned(path, stale):
                return None
            path.unlink(missing_ok=True)
        who = {"host": host(), "name": socket.gethostname(), **process(os.getpid()), "token": token}
        if not create(path, json.dumps(who)):
            return None
    return Claim(path, token, beat)


def abandoned(path: Path, stale: float = STALE) -> bool:
    """Whether nobody keeps this claim: its process is gone, or it was not touched for long."""
    found = holder(path)
    if found.get("host") == host() and isinstance(found.get("pid"), int):
        return process(found["pid"]) != {"pid": found["pid"], "started": found.get("started")}
    try:
        return now(path.parent) - path.stat().st_mtime > stale
    except OSError:
        return False  # given back this moment


def holder(path: Path) -> dict[str, Any]:
    """What a claim says; nothing where it is half written or gone."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def host() -> str:
    """This machine since its start, and the container: where process numbers mean the same."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


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


def now(folder: Path) -> float:
    """The time by the clock of the file system that the folder is on."""
    probe = folder / f".now-{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
