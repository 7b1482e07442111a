"""The store: a folder of result files that any number of processes and machines may write at once.

    runs/KEY.json            a finished run or teacher
    speeds/KEY-HARDWARE.json a candidate timed on one kind of hardware
    failures/KEY-….json      what went wrong, once for each attempt
    teachers/KEY/            a trained teacher, as `linvit.save` writes it
    work/KEY/                checkpoints of a run that is under way; gone when its file is there
    claims/KEY               who works on it now
    comparisons/….json       what was asked for
    repeats/….json           second results of one key, from stores that were merged

Result files are created whole: a reader never meets half a file, and of two writers the first one's stays. Each has a
digest of its own. A file that is damaged or not ours is left alone and noted in `notes`.

Who works on what is told by claims: a claim is a small file that one process holds and keeps fresh.

A claim is linked into place, so of two processes one gets it. It is touched every 15 seconds. When its process is
dead (same machine), or it was not touched for two minutes (another machine), somebody else may take it over. Taking
over and giving back happen under a file lock, which the system releases when a process dies.

On a network file system: `link` and `flock` are needed, which NFSv4 has. Ages are told by the file server's
clock alone, so clocks of the machines may differ. Attributes may be cached for a minute, hence the two minutes. Where
there are no locks, two processes may take over the same stale claim; then both work, and one result is kept.
"""

import json
import os
import re
import shutil
import socket
import tempfile
import threading
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from linvit.codec import digest, to_plain
from linvit.comparison.description.job import Job
from linvit.comparison.description.spec import Comparison, renamed
from linvit.comparison.files import parse_object, parse_result, to_text
from linvit.comparison.results import AnyResult, Environment, Failure, Run, Speed, SpeedIdentity
from linvit.errors import LinvitError
from linvit.files import clear_temporary, create, host, locked, own_prefix, place, process, read_json, write
from linvit.measurement.record import PACKAGE, environment, hardware

BEAT = 15.0  # seconds between two touches
STALE = 120.0  # seconds without a touch after which a claim is anybody's
LOCK = ".lock"  # beside the claims
FOLDERS = ("runs", "speeds", "failures")  # of results


class Store:
    """A store in a folder, which need not exist yet."""

    def __init__(self, folder: str | Path, *, beat: float = BEAT, stale: float = STALE) -> None:
        self.folder = place(folder)
        if self.folder.is_file():
            raise LinvitError(f"{self.folder} is a file: give a folder for the store (an archive goes to --merge)")
        self.beat, self.stale = beat, stale
        self.notes: list[str] = []

    # What is there.

    def path(self, job: Job, hardware: str | None = None) -> Path:
        """Where a job's result belongs."""
        if job.kind == "speed":
            slug = re.sub(r"[^a-z0-9]+", "-", (hardware or hardware_for(job)).lower()).strip("-")
            return self.folder / "speeds" / f"{job.key}-{slug}.json"
        return self.folder / "runs" / f"{job.key}.json"

    def trained(self, key: str) -> bool:
        """Whether the run or teacher of this key is finished."""
        return self.read(self.folder / "runs" / f"{key}.json") is not None

    def finished(self, job: Job, hardware: str | None = None) -> bool:
        """Whether the result is there; of speeds that of this machine, or of the hardware named."""
        return self.read(self.path(job, hardware)) is not None

    def result(self, job: Job) -> Run | Speed | None:
        found = self.read(self.path(job))
        return None if isinstance(found, Failure) else found

    def results(self) -> Iterator[AnyResult]:
        """All that is there, folder by folder in the order of names."""
        paths = (path for folder in FOLDERS for path in sorted((self.folder / folder).glob("*.json")))
        yield from (found for found in map(self.read, paths) if found is not None)

    def failures(self, key: str = "") -> list[Failure]:
        """What went wrong, with one job or with any, oldest first."""
        read = map(self.read, (self.folder / "failures").glob(f"{key}*.json"))
        found = [failure for failure in read if isinstance(failure, Failure)]
        return sorted(found, key=lambda failure: (failure.attempt, failure.environment.time))

    def comparisons(self) -> list[Comparison]:
        """What was asked for, oldest first."""
        found = []
        for path in sorted((self.folder / "comparisons").glob("*.json")):
            try:
                data = parse_object(path.read_bytes())
                found.append((data["time"], path.name, Comparison.from_dict(renamed(data["comparison"]))))
            except (OSError, TypeError, KeyError, LinvitError) as error:
                self.note(f"{path} is no comparison ({error}): left aside")
        ordered = [comparison for *_, comparison in sorted(found, key=lambda row: row[:2])]
        return [comparison for i, comparison in enumerate(ordered) if comparison not in ordered[:i]]

    def read(self, path: Path) -> AnyResult | None:
        """A result file, or None where there is none; one that is damaged or not ours is noted."""
        try:
            return parse_result(path.read_bytes(), path.name)
        except FileNotFoundError:
            pass
        except (LinvitError, OSError) as error:
            self.note(f"{path} was left aside: {error}")
        return None

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # What is added.

    def ask(self, comparison: Comparison) -> None:
        """Keep what was asked for, so that `linvit compare -o STORE` goes on with it. Asked again with data, teacher or
        backbone in another place, it is the same comparison, and the new place holds."""
        data = comparison.to_dict()
        asked = {"kind": "comparison", "time": datetime.now(UTC).isoformat(timespec="seconds"), "comparison": data}
        same = {**data, "data": Path(comparison.data).name, "root": "", "teacher": Path(comparison.teacher).name}
        same["teacher_recipe"] = comparison.teacher_recipe_name
        if isinstance(backbone := comparison.architecture.get("backbone"), str):
            same["architecture"] = {**data["architecture"], "backbone": Path(backbone).name}
        path = self.folder / "comparisons" / f"{digest(same)}.json"
        before = read_json(path)
        if not isinstance(before, dict) or before.get("comparison") != data:
            write(path, to_text(asked))

    def claim(self, job: Job, hardware: str | None = None) -> "Claim | None":
        """The right to work on a job; None where somebody alive has it, or it is finished."""
        held = take(self.claim_path(job, hardware), self.beat, self.stale)
        if held is not None and self.finished(job, hardware):
            held.release()
            return None
        return held

    def claimed(self, job: Job) -> bool:
        """Whether somebody alive works on a job."""
        path = self.claim_path(job)
        return path.exists() and not abandoned(path, self.stale)

    def claimed_here(self, job: Job) -> bool:
        """Whether another process of this machine works on a job."""
        found = holder(self.claim_path(job))
        return found.get("host") == host() and found.get("pid") != os.getpid() and self.claimed(job)

    def claim_path(self, job: Job, hardware: str | None = None) -> Path:
        return self.folder / "claims" / self.path(job, hardware).stem

    def write(self, job: Job, result: Run | Speed) -> bool:
        """Add a result and clear the work behind it. False where another was first: its file stays."""
        if (result.kind, result.key) != (job.kind, job.key):
            raise ValueError(f"this is the result of {result.kind} {result.key}, not of {job.kind} {job.key}")
        path = self.path(job, result.environment.hardware)
        if path.exists() and self.read(path) is None:
            set_aside(path)
        written = create(path, to_text(result))
        shutil.rmtree(self.work_folder(job.key), ignore_errors=True)
        return written

    def failure(self, job: Job, error: BaseException | str) -> Failure:
        """The record of what went wrong with a job on this machine, to be added by `add_failure`."""
        where = Environment(**environment("cuda" if torch.cuda.is_available() else "cpu"))
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = "" if isinstance(error, LinvitError | str) else f"{type(error).__name__}: "
        trace = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
        said, trace = self.portable(kind + lines[0]), self.portable(trace)
        return Failure(**head_of(job, "failure"), error=said, traceback=trace, environment=where)

    def add_failure(self, failure: Failure) -> Failure:
        failure = replace(failure, attempt=len(self.failures(failure.key)) + 1)
        data = to_plain(failure)
        create(self.folder / "failures" / f"{failure.key}-{digest(data, 8)}.json", to_text(data))
        return failure

    def portable(self, text: str) -> str:
        """Text without the folders of this machine, which mean nothing where the store may travel to."""
        for folder in (self.folder.resolve(), self.folder, PACKAGE.parent, Path(torch.__file__).parents[1]):
            text = re.sub(rf"(?<![\w./-]){re.escape(f'{folder}{os.sep}')}", "", text)  # whole paths, not ends of others
        return text

    def clear(self) -> None:
        """Remove what killed processes left half written."""
        clear_temporary(*(Path(folder) for folder, _, _ in os.walk(self.folder)))

    def teacher_folder(self, key: str) -> Path:
        return self.folder / "teachers" / key

    def work_folder(self, key: str) -> Path:
        return self.folder / "work" / key


def head_of(job: Job, kind: str) -> dict[str, Any]:
    """What every result of a job begins with."""
    names = ("key", "candidate_key", "label", "identity", "command")
    return {"kind": kind, **{name: getattr(job, name) for name in names}}


def set_aside(path: Path) -> None:
    """Make place for a whole file where a damaged one is."""
    os.replace(path, path.with_name(f"{path.name}.damaged-{os.getpid()}"))


def devices_of(job: Job) -> tuple[str, ...]:
    """The devices that a speed job is about, present or not."""
    named = job.identity.devices if isinstance(job.identity, SpeedIdentity) else ()
    return named or ("cpu", "cuda")


def hardware_for(job: Job) -> str:
    """The name of the hardware that a speed job is about on this machine: the GPU, where one takes part."""
    return hardware("cuda" if "cuda" in devices_of(job) and torch.cuda.is_available() else "cpu")


class ClaimLost(Exception):
    """Another process took the claim over, because this one slept too long."""


class Claim:
    """A held claim, until it is released; `check` raises when it was lost on the way."""

    def __init__(self, path: Path, token: str, beat: float = BEAT) -> None:
        self.path, self.token, self.lost = path, token, False
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


def take(path: Path, beat: float = BEAT, stale: float = STALE) -> Claim | None:
    """Claim what `path` stands for, unless somebody alive holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    who = {"host": host(), "name": socket.gethostname(), **process(os.getpid()), "token": token}
    with locked(path.parent / LOCK):
        if path.exists():
            if not abandoned(path, stale):
                return None
            path.unlink(missing_ok=True)
        return Claim(path, token, beat) if create(path, json.dumps(who)) else None


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


def now(folder: Path) -> float:
    """The time by the clock of the file system that the folder is on."""
    with tempfile.NamedTemporaryFile(prefix=own_prefix(), dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
