"""Time over tokens on log axes, with the memory floor: the picture of a `bench op` result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linvit.errors import LinvitError
from linvit.figures.style import picture
from linvit.measurement.speed import compare_op

# Ours is the one bold colour; the others are told apart by marker too, for readers who see no colour.
STYLES = {
    "ours": {"color": "#d1495b", "marker": "o", "linewidth": 2.4, "zorder": 4},
    "sdpa": {"color": "#30638e", "marker": "s", "linewidth": 1.6},
    "reference": {"color": "#8d99ae", "marker": "^", "linewidth": 1.2},
    "compiled": {"color": "#5f6b7a", "marker": "v", "linewidth": 1.2},
}
LABELS = {"sdpa": "softmax (SDPA)", "reference": "reference, eager", "compiled": "reference, compiled"}


def plot_op(result: dict[str, Any], path: Path) -> None:
    """Draw the batch, heads and head dim measured at the most token counts (the largest of them where several tie)."""
    series: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for line in compare_op(result):
        shape = line["shape"]
        series.setdefault((shape.batch, shape.heads, shape.head_dim), []).append(line)
    if not series:
        raise LinvitError("the result file has no rows to draw")
    chosen = max(series, key=lambda where: (len(series[where]), where))
    passes = [p for p in ("forward", "forward+backward") if any(line["pass"] == p for line in series[chosen])]
    with picture(path, 4.6 * len(passes) + 0.4, 4.2) as figure:
        panels = figure.subplots(1, len(passes), squeeze=False)[0]
        for panel, which in zip(panels, passes, strict=True):
            drawn = sorted((ln for ln in series[chosen] if ln["pass"] == which), key=lambda ln: ln["shape"].tokens)
            _panel(panel, which, drawn, result["mechanism"])
        panels[0].set_ylabel("milliseconds")
        panels[0].legend()
        where = f"batch {chosen[0]}, {chosen[1]} heads of {chosen[2]}, {result['dtype']}"
        figure.suptitle(f"{where}, {result['environment']['hardware']}", fontsize=10)


def _panel(panel: Any, which: str, drawn: list[dict[str, Any]], mechanism: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    tokens = [line["shape"].tokens for line in drawn]
    panel.plot(tokens, [line["floor_ms"] for line in drawn], color="black", linestyle=":", label="memory floor")
    for name, style in STYLES.items():
        points = [(line["shape"].tokens, line["ms"].get(name)) for line in drawn]
        points = [(n, ms) for n, ms in points if ms is not None]
        if points:
            panel.plot(*zip(*points, strict=True), label=LABELS.get(name, mechanism), markersize=5, **style)
    panel.set(xscale="log", yscale="log", xlabel="tokens", title=which.replace("+", " + "), xticks=tokens)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    panel.grid()
