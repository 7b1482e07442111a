"""Which layers matter: bars for how far the outputs turn, the kept layers marked in the order they were chosen."""

from __future__ import annotations

from pathlib import Path

from linvit.conversion.sensitivity import Sensitivity
from linvit.figures.style import BLUE, GREY, INK, picture


def plot_sensitivity(sensitivity: Sensitivity, path: Path) -> None:
    """Draw what a calibration measured."""
    layers = sensitivity.layers
    with picture(path, max(5.0, 0.45 * len(layers) + 1.5), 3.2) as figure:
        ax = figure.subplots()
        colours = [BLUE if layer.kept else GREY for layer in layers]
        ax.bar([layer.index for layer in layers], [layer.turn for layer in layers], color=colours, width=0.7)
        style = {"ha": "center", "va": "bottom", "color": BLUE, "fontsize": 8}
        for layer in layers:
            if layer.kept:
                ax.annotate(str(layer.kept), (layer.index, layer.turn), **style)  # type: ignore[arg-type]
        ax.set(
            xlabel="layer",
            ylabel="outputs turn by (1 − cosine)",
            title=f"One layer made linear at a time, {sensitivity.images} images",
            xticks=[layer.index for layer in layers],
        )
        if sensitivity.keep:
            note = f"Blue: the {len(sensitivity.keep)} layers to keep quadratic, in the order they were chosen."
            figure.supxlabel(note, fontsize=8, color=INK)
