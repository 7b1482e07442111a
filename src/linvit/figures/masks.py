"""The share of non-zeros in Castling's masks over the steps of a training, a line for each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linvit.errors import LinvitError
from linvit.figures.style import picture


def mask_lines(
    records: list[dict[str, Any]],
) -> tuple[list[str], list[int], list[list[float]], list[tuple[int, float]]]:
    """From a run's log: the layers, the steps, the share of each step and layer, and where the branch was annealed."""
    noted = [(record["step"], record["kept"]) for record in records if record.get("kept")]
    if not noted:
        raise LinvitError("the run logged no masks: train a model converted by the plan castling")
    steps: list[int] = []
    shares: list[list[float]] = []
    scales: list[tuple[int, float]] = []
    for step, kept in noted:
        steps += range(kept["first_step"], kept["first_step"] + len(kept["share"]))
        shares += kept["share"]
        scales.append((step, kept["scale"]))
    return noted[0][1]["layers"], steps, shares, scales


def plot_masks(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the shares on a logarithmic axis, and the weight of the branch where it was annealed."""
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
