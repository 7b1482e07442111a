"""What conversion loses and training returns: tables and a picture of the recovery experiment's store.

    python -m scripts.recovery benchmarks/stores/recovery.tar.xz docs/results.md --picture docs/recovery.png \\
        --speeds FILE …

The tables go between the page's marks that bear the store's name. A store may hold several recipes and budgets; runs
belong together by recipe, epochs, candidate and seed. A budget is so many epochs, whatever a recipe does with an image,
so recipes of one budget need not take the same time. Seconds, for a second picture beside the first, are those of a
training that has the device to itself, from files that `linvit bench training` wrote, one a recipe: runs that share a
device say little about its speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from linvit.comparison.results import ConversionResult, Run
from linvit.comparison.scheduling.travel import store_name
from linvit.comparison.statistics.estimates import Difference, average, estimate
from linvit.comparison.statistics.reading import read
from linvit.comparison.statistics.rows import difference_of_runs

PLAIN, FAST = "distil", "fast"
COLOURS = {PLAIN: "#8d99ae", FAST: "#d1495b"}
ORDER = ("softmax", "mixa", "stella", "relu_linear")  # first; then the others, as they are called


@dataclass(frozen=True)
class Speeds:
    """Epochs a second, by recipe and mechanism, and the seconds that go to what is solved before a stage's steps."""

    rates: dict[tuple[str, str], float]
    before: dict[tuple[str, str], float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rates)

    def seconds(self, name: str, recipe: str, budget: float) -> float | None:
        place = recipe, name.partition(":")[0]
        rate = self.rates.get(place)
        return None if rate is None else self.before.get(place, 0.0) + budget / rate


@dataclass(frozen=True)
class Cell:
    """The runs of one candidate by one recipe within one budget, by seed."""

    runs: dict[int, Run]

    def mean(self, of: Callable[[ConversionResult], float | None]) -> float | None:
        """The mean over seeds of a number of the conversion."""
        return average(of(run.conversion) for run in self.runs.values() if run.conversion)

    @property
    def top1(self) -> float:
        return estimate([run.score for run in self.runs.values()]).mean

    def against(self, other: Cell) -> Difference | None:
        return difference_of_runs(self.runs, other.runs)


Cells = dict[tuple[str, str, int], Cell]  # by candidate, recipe and budget


def cells(runs: Iterable[Run]) -> Cells:
    found: Cells = {}
    for run in runs:
        config = run.identity.config
        place = run.label.candidate, config["recipe"], round(config["epochs"])
        found.setdefault(place, Cell({})).runs[run.seed] = run
    return found


def names(found: Cells) -> list[str]:
    def place(name: str) -> tuple[int, str]:
        plan = name.partition(":")[0]
        return (ORDER.index(plan) if plan in ORDER else len(ORDER), name)

    return sorted({name for name, _, _ in found}, key=place)


def budgets(found: Cells) -> list[int]:
    return sorted({budget for _, _, budget in found})


def tables(found: Cells, speeds: Speeds) -> str:
    """What was reached, how it compares, and how near it came to the teacher."""
    recipes = [recipe for recipe in (PLAIN, FAST) if any(key[1] == recipe for key in found)]
    most = max(budget for _, recipe, budget in found if recipe == recipes[-1])  # plain ones may go on for longer
    there = {key[1:] for key in found}
    columns = [(recipe, budget) for recipe in recipes for budget in budgets(found) if (recipe, budget) in there]
    rivals = [(min(budget, most), budget) for budget in budgets(found)]
    reached, counted, compared, near, lasted = [], [], [], [], []
    for name in names(found):
        mine = [cell for (candidate, _, _), cell in found.items() if candidate == name]
        zero = next((value for cell in mine if (value := cell.mean(lambda found: found.zero_shot)) is not None), None)
        tops = [number(cell.top1 if (cell := found.get((name, *column))) else None) for column in columns]
        seeds = [str(len(cell.runs)) if (cell := found.get((name, *column))) else "–" for column in columns]
        reached.append([f"`{name}`", number(zero), *tops])
        counted.append([f"`{name}`", *seeds])
        gains = [apart(found, (name, FAST, least), (name, PLAIN, budget)) for least, budget in rivals]
        lost = [apart(found, (name, recipe, most), ("softmax", recipe, most)) for recipe in recipes]
        compared.append([f"`{name}`", *gains, *lost])
        ends = [found.get((name, recipe, most)) for recipe in recipes]
        alike = [number(cell and cell.mean(lambda found: found.agreement)) for cell in ends]
        near.append([f"`{name}`", *alike, *(number(cell and cell.mean(lambda found: found.kl), 3) for cell in ends)])
        times = [number(speeds.seconds(name, recipe, most)) for recipe in (PLAIN, FAST)]
        lasted.append([f"`{name}`", *times, *(ahead_in_time(found, speeds, name, budget) for budget in budgets(found))])
    seconds = (
        f"Seconds for {most} epochs, without what is compiled first, if a run has the device to itself; "
        f"and {FAST} − {PLAIN} in points if both take the time that {FAST} takes for so many epochs, {PLAIN} read off "
        "the line between two budgets over the logarithm of time.",
        grid(["candidate", PLAIN, FAST, *(f"same seconds, {budget}" for budget in budgets(found))], lasted),
    )
    return "\n\n".join((
        "Top-1 in percent, means over seeds: right after the conversion, and after so many epochs.",
        grid(["candidate", "converted", *(f"{recipe}, {budget}" for recipe, budget in columns)], reached),
        "Over how many seeds these are:",
        grid(["candidate", *(f"seeds of {recipe}, {budget}" for recipe, budget in columns)], counted),
        "Paired differences in points over seeds and images, with their 95 % intervals.",
        grid(["candidate", *(f"{FAST} − {PLAIN}, {budget}" if own == budget else f"{FAST}, {own} − {PLAIN}, {budget}"
                             for own, budget in rivals),
              *(f"to softmax, both by {recipe}, {most}" for recipe in recipes)], compared),
        f"Nearness to the teacher after {most} epochs: the same answer, in percent, and KL divergence.",
        grid(["candidate", *(f"agreement, {recipe}" for recipe in recipes),
              *(f"KL, {recipe}" for recipe in recipes)], near),
        *(seconds if speeds else ()),
    ))  # fmt: skip


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns and rows in which nothing stands."""
    columns = [0, *(i for i in range(1, len(head)) if any(row[i] for row in rows))]
    kept = [[row[i] for i in columns] for row in rows]
    lines = [
        [head[i] for i in columns],
        ["---", *["---:"] * (len(columns) - 1)],
        *(row for row in kept if any(row[1:])),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def splice(page: Path, name: str, text: str) -> None:
    """Put the text between the page's marks of that name; without a page, it is the page."""
    marks = f"<!-- {name} -->", f"<!-- /{name} -->"
    before = page.read_text(encoding="utf-8") if page.exists() else "".join(marks)
    head, begin, rest = before.partition(marks[0])
    _, end, tail = rest.partition(marks[1])
    if not (begin and end):
        raise SystemExit(f"{page} has no place for the tables: add a line {marks[0]} and a line {marks[1]}")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def apart(found: Cells, a: tuple[str, str, int], b: tuple[str, str, int]) -> str:
    """The paired difference with its 95 % interval over seeds and images."""
    if a == b or a not in found or b not in found:
        return ""
    made = found[a].against(found[b])
    if made is None:
        return ""
    text = f"{made.mean:+.1f}"
    return text if made.interval is None else f"{text} [{made.interval[0]:+.1f}, {made.interval[1]:+.1f}]"


def ahead_in_time(found: Cells, speeds: Speeds, name: str, budget: int) -> str:
    """How far the fast recipe is above the plain one that takes as long, where that lies between two of its budgets."""
    lasts, cell = speeds.seconds(name, FAST, budget), found.get((name, FAST, budget))
    if not (lasts and cell):
        return ""
    plain = [(speeds.seconds(name, PLAIN, b), found.get((name, PLAIN, b))) for b in budgets(found)]
    points = [(time, other.top1) for time, other in plain if time and other]
    for (before, low), (after, high) in pairwise(points):
        if before <= lasts <= after:
            return f"{cell.top1 - low - (high - low) * log(lasts / before) / log(after / before):+.1f}"
    return ""


def read_speeds(files: Iterable[Path]) -> Speeds:
    """How many epochs a second each recipe does with each mechanism, all its stages counted."""
    found = Speeds({})
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        for row in result["rows"]:
            if row["status"] == "ok":
                place = result["recipe"]["recipe"], row["attention"].partition(":")[0]
                found.before[place] = sum(stage["prepare_seconds"] for stage in row["stages"])
                found.rates[place] = result["recipe"]["epochs"] / (row["seconds"] - found.before[place])
    return found


def draw(found: Cells, teacher: float | None, path: Path, speeds: Speeds | None = None) -> None:
    """Accuracy over epochs, or with speeds over seconds: a panel for each candidate that had several budgets."""
    shown = [name for name in names(found) if len(budgets_of(found, name)) > 1] or names(found)
    across = min(3, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(3.4 * across, 2.5 * down + 0.3), layout="constrained", dpi=150)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, name in zip(panels, shown, strict=False):
        draw_panel(panel, found, name, teacher, speeds)
    for panel in panels[len(shown) :]:
        panel.axis("off")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.supxlabel("epochs" if speeds is None else "seconds of training, compilation not counted", fontsize=9)
    figure.supylabel("top-1, %", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def budgets_of(found: Cells, name: str) -> set[int]:
    return {budget for candidate, _, budget in found if candidate == name}


def draw_panel(panel: Any, found: Cells, name: str, teacher: float | None, speeds: Speeds | None) -> None:
    for recipe in (PLAIN, FAST):
        points = [(budget, cell) for budget in budgets(found) if (cell := found.get((name, recipe, budget)))]
        x = [budget if speeds is None else speeds.seconds(name, recipe, budget) for budget, _ in points]
        if not points or x[0] is None:
            continue
        panel.plot(x, [cell.top1 for _, cell in points], "o-", color=COLOURS[recipe], label=recipe, ms=4, lw=1.5)
        for place, (_, cell) in zip(x, points, strict=True):
            tops = [run.score for run in cell.runs.values()]
            panel.plot([place, place], [min(tops), max(tops)], color=COLOURS[recipe], lw=0.8)
    if teacher is not None:
        panel.axhline(teacher, color="black", lw=0.8, ls=":", label="teacher")
    panel.set_xscale("log")
    ticks = budgets(found) if speeds is None else (1, 3, 10, 30)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.margins(x=0.15, y=0.12)
    panel.set_title(name, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def main(store: Path, page: Path, picture: Path | None = None, speeds: Sequence[Path] = ()) -> None:
    results = read([store])
    found = cells(results.runs)
    teacher = next((run.conversion.teacher_score for run in results.runs if run.conversion), None)
    measured = read_speeds(speeds)
    if picture:
        draw(found, teacher, picture)
    if picture and measured:
        draw(found, teacher, picture.with_stem(f"{picture.stem}-seconds"), measured)
    splice(page, store_name(store), tables(found, measured))


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("store", type=Path)
    asked.add_argument("page", type=Path, help="with places for the tables")
    asked.add_argument("--picture", type=Path)
    asked.add_argument("--speeds", type=Path, nargs="+", default=[], help="what `linvit bench training` wrote")
    given = asked.parse_args()
    main(given.store, given.page, given.picture, given.speeds)
