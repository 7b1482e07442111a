"""What a training shows while it goes: a bar at a terminal, a line now and then in a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 10.0  # seconds between two lines where there is no terminal
Watch = Callable[[dict[str, Any]], None]


def first_process() -> bool:
    """Whether this is the one of the processes that `torchrun` started which talks to the user."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def screen(notes_only: bool = False) -> Iterator[Watch]:
    """A function that takes the run's records. On stderr, so that stdout holds the result alone."""
    from rich.console import Console

    errors = Console(stderr=True, highlight=False)
    if notes_only or not first_process():
        yield print_note
    elif errors.is_terminal:
        yield from bar(errors)
    else:
        yield plain()


def print_note(record: dict[str, Any]) -> None:
    if record["kind"] == "note":
        print(record["text"], file=sys.stderr)


def bar(errors: Any) -> Iterator[Watch]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    task: Any = None
    top1 = ""
    with Progress(*columns, console=errors, transient=True) as shown:

        def watch(record: dict[str, Any]) -> None:
            nonlocal task, top1
            if record["kind"] == "note":
                errors.print(record["text"])
            elif record["kind"] == "eval":
                top1 = f"  {score(record)}"
            else:
                if task is None:
                    task = shown.add_task("", total=record["steps"], text="")
                    shown.update(task, completed=record["step"])
                shown.update(task, completed=record["step"], description=record["stage"], text=words(record) + top1)

        yield watch


def plain() -> Watch:
    """Lines for a log file: every evaluation and note, and the training now and then."""
    last = 0.0

    def watch(record: dict[str, Any]) -> None:
        nonlocal last
        print_note(record)
        if record["kind"] == "eval":
            print(f"step {record['step']}: {score(record)}", file=sys.stderr)
        elif record["kind"] == "train" and time.monotonic() - last > PATIENCE:
            last = time.monotonic()
            print(f"step {record['step']} of {record['steps']}: {words(record)}", file=sys.stderr)

    return watch


def score(record: dict[str, Any]) -> str:
    """What an evaluation found, in few words."""
    if "top1" in record:
        return f"top-1 {record['top1']:.2f}"
    return f"agrees with the teacher on {record['agreement']:.2f} %, KL {record['kl']:.4f}"


def words(record: dict[str, Any]) -> str:
    """The loss and speed of a record, in few words."""
    accuracy = "".join(f"  {name} {100 * record[name]:.1f} %" for name in ("accuracy", "agreement") if name in record)
    speed = f"  {record['images_per_second']:,.0f} images/s" if record["images_per_second"] else ""
    return f"loss {record['loss']:.4f}{accuracy}{speed}"
