"""The store: a folder of result files that any number of processes and machines may write at once.

    runs/KEY.json            a finished run or teacher
    speeds/KEY-HARDWARE.json a candidate timed on one kind of hardware
    failures/KEY-….json      what went wrong, once for each attempt
    teachers/KEY/            a trained teacher, as `linvit.save` writes it
    work/KEY/                checkpoints of a run that is under way; gone when its file is there
    claims/KEY               who works on it now
    comparisons/….json       what was asked for
    repeats/….json           second results of one key, from stores that were merged

Result files are written beside their place, synced and linked into it: a reader never meets half a file, and of two
writers the first one's stays. A file that is damaged or not ours is left alone and noted in `notes`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import linvit
from linvit.comparison.claims import BEAT, STALE, Claim, abandoned, take
from linvit.comparison.grid import Task
from linvit.comparison.identity import digest
from linvit.comparison.spec import Comparison
from linvit.errors import LinvitError
from linvit.files import write_json
from linvit.measurement.record import environment, hardware

FOLDERS = {"run": "runs", "teacher": "runs", "speed": "speeds", "failure": "failures"}
KEY = re.compile(r"[0-9a-f]{16}")


class Store:
    """A store in a folder, which need not exist yet."""

    def __init__(self, folder: str | Path, *, beat: float = BEAT, stale: float = STALE) -> None:
        self.folder = Path(folder)
        if self.folder.is_file():
            raise LinvitError(f"{self.folder} is a file: give a folder for the store (an archive goes to --merge)")
        self.beat, self.stale = beat, stale
        self.notes: list[str] = []

    # What is there.

    def path(self, task: Task, hardware: str | None = None) -> Path:
        """Where a task's result belongs."""
        if task.kind == "speed":
            return self.folder / "speeds" / f"{task.key}-{slug(hardware or hardware_for(task))}.json"
        return self.folder / "runs" / f"{task.key}.json"

    def finished(self, task: Task, *, anywhere: bool = False) -> bool:
        """Whether the result is there; of speeds this machine's, or with `anywhere` any machine's."""
        if task.kind == "speed" and anywhere:
            return any(self.read(path) for path in self.folder.glob(f"speeds/{task.key}-*.json"))
        return self.read(self.path(task)) is not None

    def result(self, task: Task) -> dict[str, Any] | None:
        return self.read(self.path(task))

    def results(self, kind: str) -> list[dict[str, Any]]:
        """All results of a kind (run, teacher, speed or failure), in the order of their names."""
        found = (self.read(path) for path in sorted((self.folder / FOLDERS[kind]).glob("*.json")))
        return [result for result in found if result is not None and result["kind"] == kind]

    def failures(self, key: str) -> list[dict[str, Any]]:
        """What went wrong with a task, oldest first."""
        read = (self.read(path) for path in (self.folder / "failures").glob(f"{key}-*.json"))
        found = [failure for failure in read if failure is not None]
        return sorted(found, key=lambda failure: (failure.get("attempt", 0), str(failure["environment"].get("time"))))

    def comparisons(self) -> list[Comparison]:
        """What was asked for, oldest first."""
        found = []
        for path in sorted((self.folder / "comparisons").glob("*.json")):
            data = read_json(path)
            try:
                found.append((data["time"], path.name, Comparison.from_dict(data["comparison"])))
            except (TypeError, KeyError, LinvitError) as error:
                self.note(f"{path} is no comparison ({error}): left aside")
        return [comparison for *_, comparison in sorted(found, key=lambda row: row[:2])]

    def read(self, path: Path) -> dict[str, Any] | None:
        """A result file, or None where there is none; one that is damaged or not ours is noted."""
        if not path.exists():
            return None
        found = read_json(path)
        if not (isinstance(found, dict) and found.get("kind") in FOLDERS and valid(found, path)):
            self.note(f"{path} is damaged or no result file: left aside")
            return None
        return found

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # What is added.

    def ask(self, comparison: Comparison) -> None:
        """Keep what was asked for, so that `linvit compare -o STORE` goes on with it. Asked again with data or teacher
        in another place, it is the same comparison, and the new place holds."""
        data = comparison.to_dict()
        asked = {"kind": "comparison", "time": datetime.now(UTC).isoformat(timespec="seconds"), "comparison": data}
        same = {**data, "data": Path(comparison.data).name, "root": "", "teacher": Path(comparison.teacher).name}
        path = self.folder / "comparisons" / f"{digest(same)}.json"
        before = read_json(path)
        if not isinstance(before, dict) or before.get("comparison") != data:
            write_json(path, asked)

    def claim(self, task: Task) -> Claim | None:
        """The right to work on a task; None where somebody alive has it, or it is finished."""
        name = task.key if task.kind != "speed" else self.path(task).stem
        held = take(self.folder / "claims" / name, self.beat, self.stale)
        if held is not None and self.finished(task):
            held.release()
            return None
        return held

    def claimed(self, task: Task) -> bool:
        """Whether somebody alive works on a task."""
        name = task.key if task.kind != "speed" else self.path(task).stem
        path = self.folder / "claims" / name
        return path.exists() and not abandoned(path, self.stale)

    def write(self, task: Task, result: dict[str, Any]) -> bool:
        """Add a result and clear the work behind it. False where another was first: its file stays."""
        path = self.path(task, result["environment"]["hardware"])
        if not valid(result, path):
            raise ValueError(f"the result of {task.key} lacks its kind, key, label, identity or environment")
        if path.exists() and self.read(path) is None:
            os.replace(path, path.with_name(f"{path.name}.damaged-{os.getpid()}"))
        written = place(path, to_bytes(result))
        shutil.rmtree(self.folder / "work" / task.key, ignore_errors=True)
        return written

    def fail(self, task: Task, error: BaseException | str, *, device: str | None = None) -> dict[str, Any]:
        """Record that a task went wrong."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = "" if isinstance(error, LinvitError | str) else f"{type(error).__name__}: "
        trace = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
        record = {
            "kind": "failure",
            "version": 1,
            "key": task.key,
            "candidate_key": task.candidate_key,
            "label": task.label,
            "identity": task.identity,
            "command": task.command,
            "error": self.portable(kind + lines[0]),
            "traceback": self.portable(trace),
            "environment": environment(device),
            "attempt": len(self.failures(task.key)) + 1,
        }
        content = to_bytes(record)
        place(self.folder / "failures" / f"{task.key}-{hashlib.sha256(content).hexdigest()[:8]}.json", content)
        return record

    def portable(self, text: str) -> str:
        """Text without the folders of this machine, which mean nothing where the store may travel to."""
        packages = Path(linvit.__file__).parents[1], Path(torch.__file__).parents[1]
        for folder in (self.folder.resolve(), self.folder, *packages):
            text = re.sub(rf"(?<![\w./-]){re.escape(f'{folder}{os.sep}')}", "", text)  # whole paths, not ends of others
        return text

    def teacher_folder(self, key: str) -> Path:
        return self.folder / "teachers" / key

    def work_folder(self, key: str) -> Path:
        return self.folder / "work" / key

    def pack(self, archive: str | Path, *, work: bool = False) -> int:
        """The store as one archive; see `travel.pack`."""
        from linvit.comparison import travel

        return travel.pack(self, Path(archive), work=work)

    def merge(self, other: str | Path, *, work: bool = True) -> dict[str, int]:
        """Add what another store has; see `travel.merge`."""
        from linvit.comparison import travel

        return travel.merge(self, Path(other), work=work)


def hardware_for(task: Task) -> str:
    """The name of the hardware that a speed task is about on this machine: the GPU, where one takes part."""
    devices = task.identity.get("devices") or ["cpu", "cuda"]
    return hardware("cuda" if "cuda" in devices and torch.cuda.is_available() else "cpu")


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def valid(result: dict[str, Any], path: Path) -> bool:
    """Whether a result has what every reader relies on, and the name it should have."""
    dicts = all(isinstance(result.get(name), dict) for name in ("label", "identity", "environment"))
    key = result.get("key")
    return dicts and isinstance(key, str) and KEY.fullmatch(key) is not None and path.name.startswith(key)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def to_bytes(data: Any) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def place(path: Path, content: bytes) -> bool:
    """Put a whole file in its place unless one is there; whether it was put."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:  # no hard links here, as on some cloud drives
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS) or path.exists():
                raise
            os.replace(temporary, path)
        sync(path.parent)
        return True
    finally:
        Path(temporary).unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Make the folder's new names last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
