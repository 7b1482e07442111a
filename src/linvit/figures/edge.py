"""The plot of `bench edge`: how many times faster than its original a converted model is, size by size."""

from itertools import product
from pathlib import Path
from typing import Any

from linvit.errors import LinvitError
from linvit.figures.style import GREY, line, picture


def plot_edge(result: dict[str, Any], path: Path) -> None:
    """A row of panels for each number of threads, a panel for each runtime that saw several sizes (or each, where none
    did), a line for each plan; above one is faster than the original."""
    original = result["rows"][0]["attention"] if result["rows"] else ""
    rows = [row for row in result["rows"] if row["status"] == "ok" and "ratio" in row and row["attention"] != original]
    if not rows:
        raise LinvitError("the result file has no rows to draw")
    pixels, plans, threads, runtimes = (
        list(dict.fromkeys(row[name] for row in rows)) for name in ("resolution", "attention", "threads", "runtime")
    )
    several = [name for name in runtimes if len({r["resolution"] for r in rows if r["runtime"] == name}) > 1]
    runtimes = several or runtimes
    with picture(path, 2.6 * len(runtimes) + 1.0, 2.4 * len(threads) + 1.0) as figure:
        panels = figure.subplots(len(threads), len(runtimes), squeeze=False, sharey=True)
        for (across, count), (down, runtime) in product(enumerate(threads), enumerate(runtimes)):
            panel = panels[across, down]
            for place, plan in enumerate(plans):
                drawn = {r["resolution"]: ratio(r) for r in rows if key(r) == (runtime, count, plan)}
                panel.plot([pixels.index(p) for p in drawn], list(drawn.values()), label=plan, **line(place))
            panel.axhline(1.0, color=GREY, linewidth=1.0, linestyle="--")
            many = "1 thread" if count == 1 else f"{count} threads"
            panel.set(title=f"{runtime}, {many}", xlabel="pixels", xticks=range(len(pixels)), yscale="log")
            panel.set_xticklabels([str(p) for p in pixels])
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
            panel.grid()
        for first in panels[:, 0]:
            first.set_ylabel("original's time ÷ its own")
        panels[0, 0].legend()
        figure.suptitle(f"{result['model']}, one image, {result['environment']['hardware']}", fontsize=10)


def ratio(row: dict[str, Any]) -> float:
    """How many times as fast as the original: with one thread by the CPU's own time, which is that on a free core."""
    return float(row["cpu_ratio" if row["threads"] == 1 else "ratio"])


def key(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["runtime"], row["threads"], row["attention"]
