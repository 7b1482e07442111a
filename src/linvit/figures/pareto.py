"""Accuracy over speed, or over cost, of a comparison's candidates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from linvit.errors import LinvitError
from linvit.figures.style import GREY, INK, line, picture


@dataclass(frozen=True)
class ParetoPoint:
    """A point: `x` is how fast or how dear, `low` and `high` the interval of the score where there is one."""

    name: str
    x: float
    score: float
    low: float | None = None
    high: float | None = None
    front: bool = False  # nobody is better in both


@dataclass(frozen=True)
class Panel:
    title: str
    xlabel: str
    ylabel: str
    candidates: Sequence[ParetoPoint]
    note: str = ""


def plot_pareto(panels: Sequence[Panel], path: Path) -> None:
    """A panel for each setting; what nobody beats in both is named in bold and joined by a line."""
    if not panels:
        raise LinvitError("the store has no finished runs to draw")
    names = sorted({c.name for panel in panels for c in panel.candidates})  # a candidate looks the same everywhere
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    with picture(path, 5.7 * across, 3.6 * down + 0.2) as figure:
        axes = figure.subplots(down, across, squeeze=False).flatten()
        for axis, panel in zip(axes, panels, strict=False):
            front = sorted((c.x, c.score) for c in panel.candidates if c.front)
            axis.plot(*zip(*front, strict=True), color=GREY, linewidth=1.2, zorder=1) if front else None
            for c in sorted(panel.candidates, key=lambda c: -c.score):
                style = {**line(names.index(c.name)), "markersize": 6}
                style |= {"color": INK} if c.name == "softmax" else {}
                if c.low is not None and c.high is not None:
                    axis.plot([c.x, c.x], [c.low, c.high], color=style["color"], linewidth=1, alpha=0.6, zorder=2)
                axis.plot(c.x, c.score, linestyle="none", label=label(c), zorder=3, **style)
            axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
            axis.set_title("\n".join(wrap(panel.title, 62)), fontsize=8.5)
            axis.grid()
            axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5)
        for axis in axes[len(panels) :]:
            axis.axis("off")
        notes = [
            "Line and ◂: nothing here is better in both. Bars: 95 % intervals.",
            *(p.note for p in panels if p.note),
        ]
        figure.supxlabel(" ".join(dict.fromkeys(notes)), fontsize=7.5, color=INK)


def label(candidate: ParetoPoint) -> str:
    return f"{candidate.name} ◂" if candidate.front else candidate.name
