"""Patch features as colours, as users of DINO know them, and how alike they are to one patch's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.figures.attention.basis import Basis
from linvit.figures.attention.capture import Seen, look
from linvit.figures.attention.choosing import usual_layer
from linvit.figures.attention.comparing import counterpart
from linvit.figures.attention.layer import SeenLayer
from linvit.figures.photographs import View
from linvit.figures.style import INK, PHOTOGRAPHS, picture

PANEL, LEAST = 1.6, 6.4  # inches: of a panel, and of the whole in width
LEGEND = (
    "Colours: the first three principal components of the first model's features, the same for all. "
    "Cosine: to the marked patch, 0 dark, 1 bright."
)


@dataclass(frozen=True)
class FeatureRow:
    """Of one photograph: each model's colours `(height, width, 3)`, and cosines `(height, width)` to a patch."""

    view: View
    mark: tuple[float, float]
    colours: Mapping[str, Tensor]
    cosines: Mapping[str, Tensor]


@dataclass(frozen=True)
class FeatureComparison:
    """What is drawn, the layer it is of, and how alike the first model's features each other's are: the mean cosine
    over patches."""

    rows: list[FeatureRow]
    layer: str
    similarity: dict[str, float]


def compare_features(
    models: Mapping[str, nn.Module], views: Sequence[View], at: tuple[float, float] | None = None, layer: str = ""
) -> FeatureComparison:
    """The features that the block around a layer puts out, the last one's unless told."""
    found: list[dict[str, tuple[SeenLayer, Tensor]]] = []
    name = ""
    for view in views:
        of: dict[str, tuple[SeenLayer, Tensor]] = {}
        first: Seen | None = None
        for label, model in models.items():
            seen = look(model, view.input(model))
            if first is None:
                first, wanted = seen, last_with_features(seen, layer)
                name = wanted.name
            own = counterpart(seen, wanted, first)
            features = own.patch_features()
            if features is None:
                raise LinvitError(f"the block around {own.name} of {label} puts out no patches: choose another layer")
            of[label] = (own, features.float().cpu())
        found.append(of)
    start = next(iter(models))
    basis = Basis.of(torch.cat([of[start][1] for of in found]))
    similarity: dict[str, list[Tensor]] = {label: [] for label in models}
    rows = []
    for view, of in zip(views, found, strict=True):
        left, top, right, bottom = view.box
        mark = view.to_input(*(at or ((left + right) / 2, (top + bottom) / 2)))
        colours, cosines = {}, {}
        for label, (own, features) in of.items():
            grid, theirs = own.grid, of[start][1]
            sides = (grid.height, grid.width)
            patch = own.at(*mark, view.size) - grid.prefix
            fits = features.shape[1] == theirs.shape[1]
            colours[label] = (basis if fits else Basis.of(features)).colours(features).unflatten(0, sides)
            cosines[label] = F.cosine_similarity(features, features[patch][None], dim=1).unflatten(0, sides)
            if features.shape == theirs.shape:
                similarity[label].append(F.cosine_similarity(features, theirs, dim=1).mean())
        rows.append(FeatureRow(view, mark, colours, cosines))
    alike = {label: float(torch.stack(values).mean()) for label, values in similarity.items() if values}
    return FeatureComparison(rows, name, alike)


def last_with_features(seen: Seen, layer: str) -> SeenLayer:
    if layer:
        return seen.layer(layer)
    whole = [own for own in seen.layers if own.grid.patches > 1 and own.patch_features() is not None]
    return whole[-1] if whole else usual_layer(seen)


def draw_features(found: FeatureComparison, path: Path, title: str = "") -> None:
    """A row for each photograph: the photograph, and of each model colours and cosines."""
    names = list(found.rows[0].colours)
    columns = 1 + 2 * len(names)
    side = max(PANEL, (LEAST - 0.3) / columns)
    heights = [side * row.view.size[0] / row.view.size[1] for row in found.rows]
    with picture(path, side * columns + 0.3, sum(heights) + 0.7, PHOTOGRAPHS) as figure:
        panels = figure.subplots(len(found.rows), columns, squeeze=False, height_ratios=heights)
        for row, axes in zip(found.rows, panels, strict=True):
            height, width = row.view.size
            frame = (-0.5, width - 0.5, height - 0.5, -0.5)
            axes[0].imshow(np.asarray(row.view.picture))
            axes[0].set_ylabel(row.view.name, fontsize=8)
            for place, name in enumerate(names):
                axes[1 + 2 * place].imshow(row.colours[name].numpy(), extent=frame)
                axes[2 + 2 * place].imshow(row.cosines[name].numpy(), extent=frame, cmap="inferno", vmin=0, vmax=1)
            for axis in axes:
                axis.set(xticks=[], yticks=[], xlim=frame[:2], ylim=frame[2:])
                axis.spines[:].set_visible(False)
            for axis in (axes[0], *axes[2::2]):
                axis.plot(*row.mark, marker="o", ms=5.5, mfc="none", mec="white", mew=2.2)
                axis.plot(*row.mark, marker="o", ms=5.5, mfc="none", mec="#12b5cb", mew=1.1)
        panels[0][0].set_title("photograph", fontsize=9)
        for place, name in enumerate(names):
            panels[0][1 + 2 * place].set_title(name, fontsize=9)
            panels[0][2 + 2 * place].set_title("cosine", fontsize=9)
        figure.suptitle(title, fontsize=10)
        figure.supxlabel(LEGEND, fontsize=7.5, color=INK)
