"""The store: a folder of result files that any number of processes and machines may write at once.

    runs/KEY.json            a finished run or teacher
    speeds/KEY-HARDWARE.json a candidate timed on one kind of hardware
    failures/KEY-….json      what went wrong, once for each attempt
    teachers/KEY/            a trained teacher, as `linvit.save` writes it
    work/KEY/                checkpoints of a run that is under way; gone when its file is there
    claims/KEY               who works on it now
    comparisons/….json       what was asked for
    repeats/….json           second results of one key, from stores that were merged

Result files are created whole: a reader never meets half a file, and of two writers the first one's stays. A file that
is damaged or not ours is left alone and noted in `notes`.
"""

from __future__ import annotations

import os
import re
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from linvit.codec import digest, to_plain
from linvit.comparison.description.spec import Comparison, renamed
from linvit.comparison.description.task import Task
from linvit.comparison.results import Environment, Failure, Run, Speed, SpeedIdentity, parse_result
from linvit.comparison.scheduling.claims import BEAT, STALE, Claim, abandoned, take
from linvit.errors import LinvitError
from linvit.files import create, read_json, to_json, write_json
from linvit.measurement.record import PACKAGE, environment, hardware

FOLDERS = {"run": "runs", "teacher": "runs", "speed": "speeds", "failure": "failures"}


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
        return self.run_path(task.key)

    def run_path(self, key: str) -> Path:
        return self.folder / "runs" / f"{key}.json"

    def finished(self, task: Task, hardware: str | None = None) -> bool:
        """Whether the result is there; of speeds that of this machine, or of the hardware named."""
        return self.read(self.path(task, hardware)) is not None

    def result(self, task: Task) -> Run | Speed | None:
        found = self.read(self.path(task))
        return None if isinstance(found, Failure) else found

    def results(self) -> Iterator[Run | Speed | Failure]:
        """All that is there, folder by folder in the order of names."""
        for folder in dict.fromkeys(FOLDERS.values()):
            for path in sorted((self.folder / folder).glob("*.json")):
                found = self.read(path)
                if found is not None:
                    yield found

    def runs(self) -> list[Run]:
        return [result for result in self.results() if isinstance(result, Run) and result.kind == "run"]

    def speeds(self) -> list[Speed]:
        return [result for result in self.results() if isinstance(result, Speed)]

    def failures(self, key: str = "") -> list[Failure]:
        """What went wrong, with one task or with any, oldest first."""
        read = (self.read(path) for path in (self.folder / "failures").glob(f"{key}*.json"))
        found = [failure for failure in read if isinstance(failure, Failure)]
        return sorted(found, key=lambda failure: (failure.attempt, failure.environment.time))

    def comparisons(self) -> list[Comparison]:
        """What was asked for, oldest first."""
        found = []
        for path in sorted((self.folder / "comparisons").glob("*.json")):
            data = read_json(path)
            try:
                found.append((data["time"], path.name, Comparison.from_dict(renamed(data["comparison"]))))
            except (TypeError, KeyError, LinvitError) as error:
                self.note(f"{path} is no comparison ({error}): left aside")
        ordered = [comparison for *_, comparison in sorted(found, key=lambda row: row[:2])]
        return [comparison for i, comparison in enumerate(ordered) if comparison not in ordered[:i]]

    def read(self, path: Path) -> Run | Speed | Failure | None:
        """A result file, or None where there is none; one that is damaged or not ours is noted."""
        try:
            return parse_result(path.read_bytes(), path.name)
        except FileNotFoundError:
            return None
        except (LinvitError, OSError) as error:
            self.note(f"{path} was left aside: {error}")
            return None

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

    def claim(self, task: Task, hardware: str | None = None) -> Claim | None:
        """The right to work on a task; None where somebody alive has it, or it is finished."""
        held = take(self.claim_path(task, hardware), self.beat, self.stale)
        if held is not None and self.finished(task, hardware):
            held.release()
            return None
        return held

    def claimed(self, task: Task) -> bool:
        """Whether somebody alive works on a task."""
        path = self.claim_path(task)
        return path.exists() and not abandoned(path, self.stale)

    def claim_path(self, task: Task, hardware: str | None = None) -> Path:
        return self.folder / "claims" / self.path(task, hardware).stem

    def write(self, task: Task, result: Run | Speed) -> bool:
        """Add a result and clear the work behind it. False where another was first: its file stays."""
        if (result.kind, result.key) != (task.kind, task.key):
            raise ValueError(f"this is the result of {result.kind} {result.key}, not of {task.kind} {task.key}")
        path = self.path(task, result.environment.hardware)
        if path.exists() and self.read(path) is None:
            set_aside(path)
        written = create(path, to_json(to_plain(result)))
        shutil.rmtree(self.work_folder(task.key), ignore_errors=True)
        return written

    def failure(self, task: Task, error: BaseException | str, *, device: str | None = None) -> Failure:
        """The record of what went wrong with a task on this machine, to be added by `add_failure`."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = "" if isinstance(error, LinvitError | str) else f"{type(error).__name__}: "
        trace = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
        return Failure(
            **head_of(task, "failure"),
            error=self.portable(kind + lines[0]),
            traceback=self.portable(trace),
            environment=Environment(**environment(device)),
        )

    def add_failure(self, failure: Failure) -> Failure:
        failure = replace(failure, attempt=len(self.failures(failure.key)) + 1)
        data = to_plain(failure)
        create(self.folder / "failures" / f"{failure.key}-{digest(data, 8)}.json", to_json(data))
        return failure

    def portable(self, text: str) -> str:
        """Text without the folders of this machine, which mean nothing where the store may travel to."""
        packages = PACKAGE.parent, Path(torch.__file__).parents[1]
        for folder in (self.folder.resolve(), self.folder, *packages):
            text = re.sub(rf"(?<![\w./-]){re.escape(f'{folder}{os.sep}')}", "", text)  # whole paths, not ends of others
        return text

    def teacher_folder(self, key: str) -> Path:
        return self.folder / "teachers" / key

    def work_folder(self, key: str) -> Path:
        return self.folder / "work" / key


def head_of(task: Task, kind: str) -> dict[str, Any]:
    """What every result of a task begins with."""
    return {
        "kind": kind,
        "key": task.key,
        "candidate_key": task.candidate_key,
        "label": task.label,
        "identity": task.identity,
        "command": task.command,
    }


def set_aside(path: Path) -> None:
    """Make place for a whole file where a damaged one is."""
    os.replace(path, path.with_name(f"{path.name}.damaged-{os.getpid()}"))


def devices_of(task: Task) -> tuple[str, ...]:
    """The devices that a speed task is about, present or not."""
    named = task.identity.devices if isinstance(task.identity, SpeedIdentity) else ()
    return named or ("cpu", "cuda")


def hardware_for(task: Task) -> str:
    """The name of the hardware that a speed task is about on this machine: the GPU, where one takes part."""
    return hardware("cuda" if "cuda" in devices_of(task) and torch.cuda.is_available() else "cpu")


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
