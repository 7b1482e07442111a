"""What every verb prints with: JSON for machines, tables for people, a progress bar for patience."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

T = TypeVar("T")
PATIENCE = 2.0  # seconds before a progress bar appears
WIDTH = 100  # no line is longer
INTERRUPTED = 130  # the shell's code for Ctrl-C

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def visible(text: object) -> str:
    """A text without effects: paths and names of classes may hold escape codes, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(text))


def say(*lines: object, err: bool = False) -> None:
    """Lines of plain text, on stdout or stderr."""
    for line in lines:
        print(visible(line), file=sys.stderr if err else sys.stdout, flush=err)


def settle_streams() -> None:
    """Make stdout and stderr take any text: where they are closed nobody reads it, and letters that an encoding lacks
    are spelt out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write out what is left while somebody can still be told. Who reads no further, as `head`, is not told."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python tries again at its end, and says so


def console(*, markup: bool = False, stderr: bool = False) -> Console:
    """Where people read: the terminal, at most WIDTH columns; plain text of that width when piped to a file. `[bold]`
    and the like are meant only with `markup`, for texts of our own; elsewhere `styled` texts are."""
    from rich.console import Console

    found = Console(highlight=False, markup=markup, stderr=stderr)
    found.width = min(found.width, WIDTH) if found.is_terminal else WIDTH
    return found


def styled(*parts: str | tuple[object, str]) -> Text:
    """A text of parts, those with a style as (text, style)."""
    from rich.text import Text

    pairs = (part if isinstance(part, tuple) else (part, "") for part in parts)
    return Text.assemble(*((visible(text), style) for text, style in pairs))


def table(rows: Iterable[Iterable[object]] = (), /, **widths: int) -> Table:
    """A table without boxes: its rows, and headings with their least widths, negative ones for numbers at the right.
    Where a terminal has no room for these, words break rather than be cut off."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    narrow = sum(abs(width) + 2 for width in widths.values()) > 0.8 * console().width  # the rest is for long words
    for heading, width in widths.items():
        least = None if narrow else abs(width)
        made.add_column(heading, justify="right" if width < 0 else "left", min_width=least, overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else visible(cell) for cell in row))
    return made


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, at a terminal, after two seconds: `with progress("sampling", 12) as advance: …; advance()`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors = Console(file=sys.stderr)  # what redirects stderr meanwhile must not swallow the bar
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, console=errors, transient=True, redirect_stdout=False, redirect_stderr=False,
        disable=not errors.is_terminal,
    )  # fmt: skip
    task = bar.add_task(visible(what), total=total)
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
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    what, text = (TextColumn(field, markup=False) for field in ("{task.description}", "{task.fields[text]}"))
    bar = BarColumn(bar_width=20)  # the text needs the room
    return Progress(SpinnerColumn(), what, bar, text, TimeRemainingColumn(), console=errors, transient=True)


@contextmanager
def screen(quiet: T | None, bars: Callable[[Progress], T], lines: Callable[[], T]) -> Iterator[T]:
    """Who hears of the work and shows it on stderr, for stdout has the result: bars at a terminal, lines in a file; or
    `quiet`, where that is given."""
    from rich.console import Console

    errors = Console(stderr=True, highlight=False, markup=False)
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
