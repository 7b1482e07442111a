"""The plots of a bench, a calibration and a training."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from linvit.conversion import Sensitivity
from linvit.conversion.planning import FrontPlan, Study
from linvit.errors import LinvitError
from linvit.figures.style import BLUE, GREY, INK, RED, picture
from linvit.measurement.speed import compare_op

Records = list[dict[str, Any]]
# Ours is the one bold colour; the others are told apart by marker too, for readers who see no colour.
LINES = {
    "ours": {"color": "#d1495b", "marker": "o", "linewidth": 2.4, "zorder": 4},
    "sdpa": {"color": "#30638e", "marker": "s", "linewidth": 1.6},
    "reference": {"color": "#8d99ae", "marker": "^", "linewidth": 1.2},
    "compiled": {"color": "#5f6b7a", "marker": "v", "linewidth": 1.2},
}
LABELS = {"sdpa": "softmax (SDPA)", "reference": "reference, eager", "compiled": "reference, compiled"}


def plot_op(result: dict[str, Any], path: Path) -> None:
    """Time over tokens on log axes, with the memory floor, of a `bench op` result: for the batch, heads and head dim
    measured at the most token counts (the largest of them where several tie)."""
    series: dict[tuple[int, int, int], dict[str, Records]] = defaultdict(lambda: defaultdict(list))
    for line in sorted(compare_op(result), key=lambda line: (line["pass"], line["shape"].tokens)):
        shape = line["shape"]
        series[shape.batch, shape.heads, shape.head_dim][line["pass"]].append(line)
    if not series:
        raise LinvitError("the result file has no rows to draw")
    chosen, passes = max(series.items(), key=lambda item: (sum(map(len, item[1].values())), item[0]))
    with picture(path, 4.6 * len(passes) + 0.4, 4.2) as figure:
        panels = figure.subplots(1, len(passes), squeeze=False)[0]
        for panel, (which, drawn) in zip(panels, passes.items(), strict=True):
            _panel(panel, which, drawn, result["mechanism"])
        panels[0].set_ylabel("milliseconds")
        panels[0].legend()
        where = f"batch {chosen[0]}, {chosen[1]} heads of {chosen[2]}, {result['dtype']}"
        figure.suptitle(f"{where}, {result['environment']['hardware']}", fontsize=10)


def _panel(panel: Any, which: str, drawn: Records, mechanism: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    tokens = [line["shape"].tokens for line in drawn]
    panel.plot(tokens, [line["floor_ms"] for line in drawn], color="black", linestyle=":", label="memory floor")
    for name, style in LINES.items():
        points = [(line["shape"].tokens, line["ms"][name]) for line in drawn if line["ms"].get(name) is not None]
        if points:
            panel.plot(*zip(*points, strict=True), label=LABELS.get(name, mechanism), markersize=5, **style)
    panel.set(xscale="log", yscale="log", xlabel="tokens", title=which.replace("+", " + "), xticks=tokens)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    panel.grid()


def plot_sensitivity(sensitivity: Sensitivity, path: Path) -> None:
    """Which layers matter: bars for how far the outputs turn, the kept layers marked in the order they were chosen."""
    layers = sensitivity.layers
    places = [layer.index for layer in layers]
    with picture(path, max(5.0, 0.45 * len(layers) + 1.5), 3.2) as figure:
        ax = figure.subplots()
        colours = [BLUE if layer.kept else GREY for layer in layers]
        bars = ax.bar(places, [layer.turn for layer in layers], color=colours, width=0.7)
        ax.bar_label(bars, [str(layer.kept or "") for layer in layers], color=BLUE, fontsize=8)
        ax.set(xlabel="layer", ylabel="outputs turn by (1 − cosine)", xticks=places)
        ax.set_title(f"One layer made linear at a time, {sensitivity.images} images")
        if sensitivity.keep:
            note = f"Blue: the {len(sensitivity.keep)} layers to keep quadratic, in the order they were chosen."
            figure.supxlabel(note, fontsize=8, color=INK)


def plot_front(study: Study, chosen: FrontPlan, path: Path) -> None:
    """What a plan buys: the speed of whole models over the layers converted or, with images, how far the outputs turn;
    predicted and measured, the chosen plan marked."""
    known = study.images > 0
    with picture(path, 5.6, 3.6) as figure:
        ax = figure.subplots()
        predicted: list[Any] = [p.predicted_turn if known else p.converted for p in study.front]
        measured: list[Any] = [p.turn if known else p.converted for p in study.front]
        speeds: list[Any] = [p.speedup for p in study.front]
        ax.plot(predicted, [study.ms / p.predicted_ms for p in study.front], color=GREY, marker="o", label="predicted")
        ax.plot(measured, speeds, color=BLUE, marker="s", label="measured")
        place = study.front.index(chosen)
        mark: Any = {"color": RED, "marker": "D", "markersize": 9, "linestyle": "none", "label": "chosen"}
        ax.plot(measured[place], speeds[place], **mark)
        for point in study.front if known else ():
            ax.annotate(
                f"{point.converted}", (point.turn, point.speedup), (4, 4), textcoords="offset points", fontsize=7
            )
        ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        ax.set(xlabel="outputs turn by (1 − cosine), before training" if known else "layers converted")
        ax.set_ylabel("speed, the original's is 1")
        height, width = study.setting.size
        ax.set_title(f"Plans at {height}×{width}, {study.setting.device.type}, {study.setting.dtype}")
        ax.legend()
        ax.grid()


def mask_lines(records: Records) -> tuple[list[str], list[int], list[list[float]], list[tuple[int, float]]]:
    """From a run's log: the layers, the steps, the share of each step and layer, and where the branch was annealed."""
    noted = [(record["step"], record["kept"]) for record in records if record.get("kept")]
    if not noted:
        raise LinvitError("the run logged no masks: train a model converted by the plan castling")
    steps = [kept["first_step"] + i for _, kept in noted for i in range(len(kept["share"]))]
    shares = [share for _, kept in noted for share in kept["share"]]
    return noted[0][1]["layers"], steps, shares, [(step, kept["scale"]) for step, kept in noted]


def plot_masks(records: Records, path: Path) -> None:
    """The share of non-zeros in Castling's masks over the steps of a training, a line for each layer on a logarithmic
    axis, and the weight of the branch where it was annealed."""
    from matplotlib import colormaps

    layers, steps, shares, scales = mask_lines(records)
    with picture(path, 6.4, 4.0) as figure:
        panel = figure.subplots()
        for index, layer in enumerate(layers):
            colour = colormaps["viridis"](index / max(1, len(layers) - 1))
            panel.plot(steps, [100 * row[index] for row in shares], color=colour, linewidth=1.2, label=layer)
        panel.set(xlabel="step", ylabel="non-zeros in the mask, %", yscale="symlog")
        panel.set_ylim(bottom=0)
        if any(scale < 1 for _, scale in scales):
            beside = panel.twinx()
            beside.plot(*zip(*scales, strict=True), color="black", linestyle=":", label="weight of the branch")
            beside.set(ylabel="weight of the branch (dotted)", ylim=(0, 1.05))
        panel.grid()
        panel.legend(fontsize=7, ncols=2)
