"""Maps beside each other as the papers print them, and what they are like over the layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from linvit.figures.attention.statistics import LayerStatistics, MapDistance
from linvit.figures.photographs import View
from linvit.figures.style import INK, PHOTOGRAPHS, line, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL, LEAST = 1.75, 7.2  # inches: of a map, and of the whole in width
LONGEST = 16  # letters over a map
COLOUR_MAP, STRENGTH = "inferno", 0.72
SCALE = "Each map from 0 (dark) to its own peak (bright); the number is the peak over an even share."
QUANTITIES = {
    "entropy": "entropy, nats",
    "effective_rank": "effective rank",
    "distance": "distance, pixels",
    "total_variation": "variation from the first",
}


@dataclass(frozen=True)
class MapRow:
    """Maps of several models of one photograph, layer and head; `mark` is the query's pixel in the model's input."""

    label: str
    view: View
    maps: Mapping[str, Tensor]  # (height, width) by the model's name
    mark: tuple[float, float] | None = None


@dataclass(frozen=True)
class LayerNumbers:
    """What one model's map of a layer is like, and how far from the first model's."""

    index: int
    name: str
    mechanism: str
    statistics: LayerStatistics
    distance: MapDistance | None = None

    def as_dict(self) -> dict[str, Any]:
        apart = {} if self.distance is None else vars(self.distance)
        return {"layer": self.index, "name": self.name, "mechanism": self.mechanism, **vars(self.statistics), **apart}


Numbers = Mapping[str, Sequence[LayerNumbers]]  # by the model's name


def shown_map(values: Tensor) -> tuple[np.ndarray, float, float]:
    """What is drawn of a map: negative weights as none; the value of the brightest colour, above which lie no more than
    one in two hundred; and the peak over the mean."""
    drawn = values.detach().float().clamp_min(0).cpu().numpy()
    mean = float(drawn.mean())
    return drawn, float(np.quantile(drawn, 0.995)) or 1.0, float(drawn.max()) / mean if mean else 0.0


def draw_maps(rows: Sequence[MapRow], numbers: Numbers, path: Path, title: str = "") -> None:
    """A row for each photograph, layer and head, with the photograph first; below, the numbers over the layers."""
    names = list(rows[0].maps)
    side = PANEL if len(rows) > 1 else max(PANEL, (LEAST - 0.5) / (len(names) + 1))
    width = max(LEAST, side * (len(names) + 1) + 0.5)
    heights = [side * row.view.size[0] / row.view.size[1] + 0.22 for row in rows]
    below = 2.0 if any(len(found) > 1 for found in numbers.values()) else 0.0
    with picture(path, width, sum(heights) + below + 0.7, PHOTOGRAPHS) as figure:
        parts: Any = figure.subfigures(2, 1, height_ratios=[sum(heights) + 0.5, below]) if below else [figure]
        panels = parts[0].subplots(len(rows), len(names) + 1, squeeze=False, height_ratios=heights)
        for row, axes in zip(rows, panels, strict=True):
            draw_row(row, axes)
        for axis, name in zip(panels[0], ["photograph", *names], strict=True):
            axis.set_title(in_two_lines(name), fontsize=9)
        if title:
            parts[0].suptitle(title, fontsize=10)
        parts[0].supxlabel(SCALE, fontsize=7.5, color=INK)
        if below:
            draw_numbers(numbers, parts[1])


def in_two_lines(name: str) -> str:
    """A plan's options under its name, where both are too long for a map's width."""
    return name.replace(":", ":\n", 1) if len(name) > LONGEST else name


def draw_row(row: MapRow, axes: "Sequence[Axes]") -> None:
    height, width = row.view.size
    photograph = np.asarray(row.view.picture)
    pale = np.asarray(row.view.picture.convert("L"))
    axes[0].imshow(photograph)
    axes[0].set_ylabel(row.label, fontsize=8)
    for axis, values in zip(axes[1:], row.maps.values(), strict=True):
        drawn, brightest, peak = shown_map(values)
        axis.imshow(pale, cmap="gray", vmin=0, vmax=255)
        frame = (-0.5, width - 0.5, height - 0.5, -0.5)
        axis.imshow(drawn, cmap=COLOUR_MAP, vmin=0, vmax=brightest, alpha=STRENGTH, extent=frame)
        axis.set_xlabel(f"{peak:.3g}×", fontsize=7.5, labelpad=2)
    for axis in axes:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        if row.mark is not None:
            axis.plot(*row.mark, marker="o", ms=5.5, mfc="none", mec="white", mew=2.2)
            axis.plot(*row.mark, marker="o", ms=5.5, mfc="none", mec="#12b5cb", mew=1.1)


def draw_numbers(numbers: Numbers, figure: Any) -> None:
    """Entropy, effective rank, distance, and total variation where there is more than one model."""
    shown = list(QUANTITIES) if len(numbers) > 1 else list(QUANTITIES)[:-1]
    panels = figure.subplots(1, len(shown))
    for place, (name, layers) in enumerate(numbers.items()):
        for panel, quantity in zip(panels, shown, strict=True):
            points = [(layer.index, layer.as_dict().get(quantity)) for layer in layers]
            points = [(index, value) for index, value in points if value is not None]
            if points and not (quantity == "total_variation" and place == 0):
                panel.plot(*zip(*points, strict=True), label=name, linewidth=1.3, **line(place))
    for panel, quantity in zip(panels, shown, strict=True):
        panel.set(xlabel="layer")
        panel.set_title(QUANTITIES[quantity], fontsize=8.5)
        panel.set_ylim(bottom=0)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid()
        panel.tick_params(labelsize=7.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=8)
