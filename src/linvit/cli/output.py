"""What every verb prints with: JSON for machines, tables for people, a progress bar for patience."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

T = TypeVar("T")
PATIENCE = 2.0  # seconds before a progress bar appears
WIDTH = 100  # no line is longer
INTERRUPTED = 130  # the shell's code for Ctrl-C

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def console() -> Console:
    """Where people read: the terminal, at most WIDTH columns; plain text of that width when piped to a file."""
    from rich.console import Console

    found = Console(highlight=False)
    found.width = min(found.width, WIDTH) if found.is_terminal else WIDTH
    return found


def table(rows: Iterable[Iterable[object]] = (), /, **widths: int) -> Table:
    """A table without boxes: its rows, and headings with their least widths, negative ones for numbers at the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading, width in widths.items():
        made.add_column(heading, justify="right" if width < 0 else "left", min_width=abs(width))
    for row in rows:
        made.add_row(*map(str, row))
    return made


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, at a terminal, after two seconds: `with progress("sampling", 12) as advance: …; advance()`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    task = bar.add_task(what, total=total)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def live(errors: Console) -> Progress:
    """Bars with a text beside them, for work that tells more than how far it is."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True)


@contextmanager
def screen(quiet: T | None, bars: Callable[[Progress], T], lines: Callable[[], T]) -> Iterator[T]:
    """Who hears of the work and shows it on stderr, for stdout has the result: bars at a terminal, lines in a file; or
    `quiet`, where that is given."""
    from rich.console import Console

    errors = Console(stderr=True, highlight=False)
    if quiet is not None or not errors.is_terminal:
        yield lines() if quiet is None else quiet
    else:
        with live(errors) as shown:
            yield bars(shown)


def tracked(rows: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The rows as they are made, each with a step of a progress bar."""
    with progress(what, total) as advance:
        for row in rows:
            yield row
            advance()
