"""Runs where a team looks: Weights & Biases, or any function of the user's.

A logger is a function of a `RunFacts` that returns a function of a record, as log.jsonl has them, perhaps with a
`close`. One that fails ends itself, not the training.
"""

import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from linvit.errors import LinvitError, reason
from linvit.files import write
from linvit.training.logs import Watch

WANDB_ID = "wandb-id.txt"  # so that a resumed run goes on in the same curves


@dataclass(frozen=True)
class RunFacts:
    """What a logger is told of a run: its folder, its recipe's values, and whether it goes on with what is there."""

    folder: Path | None
    config: dict[str, Any]
    resumed: bool = False


Logger = Callable[[RunFacts], Watch]


def find_logger(named: str | Logger) -> Logger:
    """`wandb`, `module:function`, which may lie in the current folder, or the function itself."""
    if callable(named):
        return named
    if named == "wandb":
        import_wandb()
        return to_wandb
    module, colon, name = named.partition(":")
    if not (module and colon and name):
        raise LinvitError(f"unknown logger '{named}': give wandb, or a function of yours as module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Logger = getattr(import_module(module), name)
    except Exception as error:
        raise LinvitError(f"the logger {named} cannot be imported: {reason(error)}") from error
    return found


def import_wandb() -> Any:
    try:
        return import_module("wandb")
    except ImportError:
        raise LinvitError("wandb is not installed: pip install wandb, or leave --logger out") from None


def to_wandb(run: RunFacts) -> Watch:
    """A run at Weights & Biases; its project and the rest are wandb's own environment variables to decide."""
    wandb = import_wandb()
    kept = run.folder / WANDB_ID if run.folder is not None else None
    known = kept.read_text(encoding="utf-8").strip() if run.resumed and kept is not None and kept.is_file() else ""
    identity = known or uuid.uuid4().hex[:12]
    project, name = os.environ.get("WANDB_PROJECT", "linvit"), run.folder.name if run.folder is not None else None
    made = wandb.init(project=project, name=name, id=identity, resume="allow", config=run.config)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write(kept, f"{identity}\n")

    def hear(record: dict[str, Any]) -> None:
        if record["kind"] != "note":
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            made.log({f"{record['kind']}/{name}": value for name, value in numbers.items()}, step=record["step"])

    hear.close = made.finish  # type: ignore[attr-defined]
    return hear


@contextmanager
def logging_to(named: str | Logger | None, run: RunFacts, watch: Watch | None) -> Iterator[Watch | None]:
    """`watch`, and inside the logger, if one is named, hears every record of the log with it."""
    if not named:
        yield watch
        return
    try:
        hear: Watch | None = find_logger(named)(run)
    except LinvitError:
        raise
    except Exception as error:  # as Weights & Biases, where nobody is logged in
        raise LinvitError(f"the logger cannot begin: {reason(error)}") from error
    if not callable(hear):
        raise LinvitError(f"the logger {named} gave {type(hear).__name__}: it must return a function of a record")
    close = getattr(hear, "close", None)

    step = 0

    def tell(text: str) -> None:
        if watch is not None:
            watch({"kind": "note", "step": step, "text": text})
        else:
            warnings.warn(text, stacklevel=3)

    def both(record: dict[str, Any]) -> None:
        nonlocal hear, step
        step = record["step"]
        if watch is not None:
            watch(record)
        if hear is not None and record["kind"] != "step":
            try:
                hear(record)
            except Exception as error:
                hear = None
                tell(f"the logger failed, and the run goes on without it: {reason(error)}")

    try:
        yield both
    finally:
        try:
            if close is not None:
                close()
        except Exception as error:
            tell(f"the logger could not be closed: {reason(error)}")
