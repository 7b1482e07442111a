"""What a result file says about where its numbers come from, and how it grows."""

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch

from linvit.errors import LinvitError
from linvit.files import write_json
from linvit.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
PROCESSORS = Path("/proc/cpuinfo")
SHORT = 1000  # rows up to which a file is written with each of them, longer ones once a second


def environment(device: torch.device | str, command: list[str] | None = None) -> dict[str, Any]:
    """Hardware, package versions, commit, command and time of a measurement."""
    return {
        "hardware": hardware(device),
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package("triton"),
        "cuda": torch.version.cuda,
        "timm": package("timm"),
        "linvit": __version__,
        "commit": commit(),
        "source": source_digest(),
        "command": " ".join(anywhere(word) for word in command or ["linvit", *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def anywhere(word: str) -> str:
    """A word of a command as it would be typed on another machine: of an absolute path only the last part."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{Path(value).name if Path(value).is_absolute() and value != '/' else value}"


def hardware(device: torch.device | str) -> str:
    """The name of the chip that `device` is."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu()


def cpu() -> str:
    """The processor's name where the system tells, else its architecture, with the number of cores. Virtual machines
    hide what follows the brand: family and model tell generations apart there."""
    first = PROCESSORS.read_text().partition("\n\n")[0].splitlines() if PROCESSORS.exists() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    name = told.get("model name", platform.machine())
    if "cpu family" in told and not any(letter.isdigit() for letter in name):
        name += f" (family {told['cpu family']}, model {told['model']})"
    return f"{name}, {os.cpu_count()} cores"


def package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit linvit's code is at, with `+` for changes on top; LINVIT_COMMIT where that is set, for copied code. A
    repository around it, a project whose environment it is installed in, has another."""
    if "LINVIT_COMMIT" in os.environ:
        return os.environ["LINVIT_COMMIT"]

    def git(*args: str) -> str:
        command = ["git", "-C", str(PACKAGE), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel"), "src", "linvit").resolve() != PACKAGE:
            return installed_commit()
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return installed_commit()


def installed_commit() -> str | None:
    """The commit that pip installed linvit from, where it was from a repository."""
    try:
        found = distribution("linvit")
        told = json.loads(found.read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    ours = Path(str(found.locate_file("linvit"))).resolve() == PACKAGE
    commit: str | None = told.get("vcs_info", {}).get("commit_id")
    return commit if ours else None


def source_digest() -> str:
    """A hash of the package's own source, which tells two working trees apart where no commit does."""
    parts = ((str(path.relative_to(PACKAGE)).encode(), path.read_bytes()) for path in sorted(PACKAGE.rglob("*.py")))
    return hashlib.sha256(b"".join(part for pair in parts for part in pair)).hexdigest()[:16]


class ResultFile:
    """A result file that grows row by row and is on disk soon after each: an interrupted run keeps what it has.

    `head` says what is measured. A run may only go on with a file that says the same, on the same hardware and source:
    rows of two different machines or programs do not belong in one table.
    """

    def __init__(self, path: Path, head: dict[str, Any], environment: dict[str, Any], *, resume: bool = False) -> None:
        self.path = path
        self.written = -math.inf
        self.data: dict[str, Any] = {**head, "environment": environment, "complete": False, "rows": []}
        if path.exists() and not resume:
            raise LinvitError(f"{path} exists and result files are not edited: give another name, or --resume {path}")
        old = read_result(path) if resume else self.data
        for name, ours in head.items():
            if old.get(name) != ours:
                raise LinvitError(f"{path} was measured with {name} {old.get(name)}, not {ours}")
        for name in ("hardware", "torch", "source"):
            ours, theirs = environment[name], old["environment"][name]
            if ours != theirs:
                raise LinvitError(f"{path} was measured with {name} {theirs}, this is {ours}: start a new file")
        self.data |= {"environment": old["environment"], "rows": old["rows"]}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["rows"]

    def add(self, row: dict[str, Any]) -> None:
        json.dumps(row, allow_nan=False)  # what cannot be written is an error here, not later
        self.rows.append(row)
        # Rows that were timed together come together. A long file takes longer to write than a row to measure.
        if len(self.rows) < SHORT or time.monotonic() - self.written > 1:
            write_json(self.path, self.data)
            self.written = time.monotonic()

    def fill(self, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Add the rows as they are measured, and finish."""
        for row in rows:
            self.add(row)
        return self.finish()

    def finish(self) -> dict[str, Any]:
        self.data["complete"] = True
        write_json(self.path, self.data)
        return self.data


def read_result(path: Path, kind: str | None = None) -> dict[str, Any]:
    """A result file as it was written."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as reason:
        raise LinvitError(f"cannot read the result file {path}: {reason}") from None
    if not isinstance(data, dict) or "rows" not in data or kind not in (None, data.get("kind")):
        raise LinvitError(f"{path} is not a result file{f' of {kind}' if kind else ''}")
    return data
