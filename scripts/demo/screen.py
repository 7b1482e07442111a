"""One bar over all of the demo, and lines above it. On stderr, as all of linvit's bars; without a terminal, lines."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

PARTS = {"starting": 6, "comparing": 120, "photograph": 36}  # about so many seconds each, on two cores
WIDTH = 36  # of what the bar says, so that it does not jump


class Screen:
    """`with Screen() as screen: screen.at("comparing", 0.5, "half of it")`"""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        shown = self.console.is_terminal
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not shown)
        self.bar = self.progress.add_task("starting".ljust(WIDTH), total=sum(PARTS.values()))

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away, to print the results."""
        self.progress.stop()

    def at(self, part: str, share: float, text: str) -> None:
        """How far a part is, from 0 to 1, and what is being done."""
        names = list(PARTS)
        before = sum(PARTS[name] for name in names[: names.index(part)])
        text = text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"
        self.progress.update(self.bar, completed=before + share * PARTS[part], description=text.ljust(WIDTH))

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)
