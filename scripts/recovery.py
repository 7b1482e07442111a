"""What conversion loses and training returns: a table and a picture of the recovery experiment's store.

    python scripts/recovery.py benchmarks/stores/recovery docs/recovery.md docs/recovery.png

A store may hold several recipes and budgets; runs belong together by recipe, epochs, candidate and seed. A budget is
what so many epochs of plain distillation cost, teacher included; an epoch of alignment costs about half of one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from linvit.comparison.report.reading import Run, read
from linvit.comparison.statistics import Difference, difference, estimate

PLAIN, FAST = "distil", "fast"
COLOURS = {PLAIN: "#8d99ae", FAST: "#d1495b"}


@dataclass(frozen=True)
class Cell:
    """The runs of one candidate by one recipe within one budget, by seed."""

    runs: dict[int, Run]

    def mean(self, *path: str) -> float | None:
        values = [value for run in self.runs.values() if (value := run.number(*path)) is not None]
        return estimate(values).mean if values else None

    @property
    def top1(self) -> float:
        return estimate([run.top1 for run in self.runs.values()]).mean

    def against(self, other: Cell) -> Difference | None:
        mine, theirs = ({seed: run.top1 for seed, run in cell.runs.items()} for cell in (self, other))
        seen = [{s: run.right for s, run in cell.runs.items() if run.right is not None} for cell in (self, other)]
        return difference(mine, theirs, *seen)


Cells = dict[tuple[str, str, int], Cell]  # by candidate, recipe and budget


def cells(runs: Iterable[Run]) -> Cells:
    found: Cells = {}
    for run in runs:
        recipe, epochs = run.get("identity", "config", "recipe"), round(run.get("identity", "config", "epochs"))
        found.setdefault((run.candidate, recipe, epochs), Cell({})).runs[run.seed] = run
    return found


def names(found: Cells) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in found))


def budgets(found: Cells) -> list[int]:
    return sorted({budget for _, _, budget in found})


def table(found: Cells) -> str:
    """One line a candidate: before training, after each budget by both recipes, and how the longest compares."""
    most = budgets(found)[-1]
    columns = [(recipe, budget) for budget in budgets(found) for recipe in (PLAIN, FAST)]
    head = ["candidate", "seeds", "converted", *(f"{recipe} {budget}" for recipe, budget in columns)]
    head += [f"fast − distil, {budget}" for budget in budgets(found)]
    head += [f"fast − softmax by fast, {most}", "agreement", "KL"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name in names(found):
        mine = [cell for (candidate, _, _), cell in found.items() if candidate == name]
        zero = next((value for cell in mine if (value := cell.mean("conversion", "zero_shot")) is not None), None)
        row = [name, str(max(len(cell.runs) for cell in mine)), number(zero)]
        row += [number(cell.top1 if (cell := found.get((name, *column))) else None) for column in columns]
        row += [apart(found, (name, FAST, budget), (name, PLAIN, budget)) for budget in budgets(found)]
        row.append(apart(found, (name, FAST, most), ("softmax", FAST, most)))
        best = found.get((name, FAST, most)) or found.get((name, PLAIN, most))
        row += [
            number(best and best.mean("conversion", "agreement")),
            number(best and best.mean("conversion", "kl"), 3),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


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


def draw(found: Cells, teacher: float | None, path: Path) -> None:
    """Accuracy over compute, a panel a candidate: in epochs of plain distillation, and above the points in seconds."""
    shown = names(found)
    across = min(4, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(3.1 * across, 2.7 * down + 0.3), layout="constrained", dpi=150)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, name in zip(panels, shown, strict=False):
        draw_panel(panel, found, name, teacher)
    for panel in panels[len(shown) :]:
        panel.axis("off")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.supxlabel("compute, in epochs of plain distillation; seconds beside the points", fontsize=9)
    figure.supylabel("top-1, %", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_panel(panel: Any, found: Cells, name: str, teacher: float | None) -> None:
    for recipe in (PLAIN, FAST):
        points = [(budget, cell) for budget in budgets(found) if (cell := found.get((name, recipe, budget)))]
        if not points:
            continue
        x = [budget for budget, _ in points]
        y = [cell.top1 for _, cell in points]
        panel.plot(x, y, "o-", color=COLOURS[recipe], label=recipe, ms=4, lw=1.5)
        for budget, cell in points:
            tops = [run.top1 for run in cell.runs.values()]
            panel.plot([budget, budget], [min(tops), max(tops)], color=COLOURS[recipe], lw=0.8)
            seconds = cell.mean("training", "seconds")
            if seconds is not None:
                place = (0, 6 if recipe == FAST else -12)
                panel.annotate(f"{seconds:.0f} s", (budget, cell.top1), xytext=place, textcoords="offset points",
                               ha="center", fontsize=6.5, color=COLOURS[recipe])  # fmt: skip
    if teacher is not None:
        panel.axhline(teacher, color="black", lw=0.8, ls=":", label="teacher")
    panel.set_xscale("log")
    panel.set_xticks(budgets(found), [str(budget) for budget in budgets(found)])
    panel.minorticks_off()
    panel.margins(x=0.15, y=0.12)
    panel.set_title(name, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def main(store: Path, page: Path, picture: Path) -> None:
    results = read([store])
    found = cells(results.runs)
    teachers = [run.number("conversion", "teacher_top1") for run in results.runs]
    teacher = next((value for value in teachers if value is not None), None)
    draw(found, teacher, picture)
    page.write_text(table(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
