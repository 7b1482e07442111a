"""The plot of `bench edge`: how many times faster than its original a converted model is, size by size."""

from pathlib import Path
from typing import Any

from linvit.errors import LinvitError
from linvit.figures.style import GREY, line, picture


def plot_edge(result: dict[str, Any], path: Path) -> None:
    """A panel for each runtime and number of threads, a line for each plan; above one is faster than the original."""
    original = result["rows"][0]["attention"] if result["rows"] else ""
    rows = [row for row in result["rows"] if row["status"] == "ok" and "ratio" in row and row["attention"] != original]
    if not rows:
        raise LinvitError("the result file has no rows to draw")
    settings = list(dict.fromkeys((row["runtime"], row["threads"]) for row in rows))
    plans, pixels = (list(dict.fromkeys(row[name] for row in rows)) for name in ("attention", "resolution"))
    with picture(path, 2.6 * len(settings) + 1.0, 3.4) as figure:
        panels = figure.subplots(1, len(settings), squeeze=False, sharey=True)[0]
        for panel, (runtime, threads) in zip(panels, settings, strict=True):
            for place, plan in enumerate(plans):
                drawn = {r["resolution"]: r["ratio"] for r in rows if key(r) == (runtime, threads, plan)}
                panel.plot([pixels.index(p) for p in drawn], list(drawn.values()), label=plan, **line(place))
            panel.axhline(1.0, color=GREY, linewidth=1.0, linestyle="--")
            many = "1 thread" if threads == 1 else f"{threads} threads"
            panel.set(title=f"{runtime}, {many}", xlabel="pixels", xticks=range(len(pixels)), yscale="log")
            panel.set_xticklabels([str(p) for p in pixels])
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
            panel.grid()
        panels[0].set_ylabel("the original's time ÷ its own")
        panels[0].legend()
        figure.suptitle(f"{result['model']}, one image, {result['environment']['hardware']}", fontsize=10)


def key(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["runtime"], row["threads"], row["attention"]
