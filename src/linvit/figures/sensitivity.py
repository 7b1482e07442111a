"""Which layers matter: bars for how far the outputs turn, the kept layers marked in the order they were chosen."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from linvit.conversion.sensitivity import Sensitivity
from linvit.figures.theory import BLUE, GREY, INK, STYLE


def draw(sensitivity: Sensitivity, path: Path) -> None:
    """Write the bar plot to `path`; its suffix names the format."""
    layers = sensitivity.layers
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(max(5.0, 0.45 * len(layers) + 1.5), 3.2), layout="constrained", dpi=150)
        ax = figure.subplots()
        colours = [BLUE if layer.kept else GREY for layer in layers]
        ax.bar([layer.index for layer in layers], [layer.turn for layer in layers], color=colours, width=0.7)
        for layer in layers:
            if layer.kept:
                ax.annotate(
                    str(layer.kept), (layer.index, layer.turn), ha="center", va="bottom", color=BLUE, fontsize=8
                )
        ax.set(
            xlabel="layer",
            ylabel="outputs turn by (1 − cosine)",
            title=f"One layer made linear at a time, {sensitivity.images} images",
            xticks=[layer.index for layer in layers],
        )
        if sensitivity.keep:
            note = (
                f"Blue: the {len(sensitivity.keep)} layers to keep quadratic, numbered in the order they were chosen."
            )
            figure.supxlabel(note, fontsize=8, color=INK)
        figure.savefig(path)
