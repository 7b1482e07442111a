"""What of a map is shown: whose queries, which layers and which heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.figures.attention.capture import Seen
from linvit.figures.attention.layer import SeenLayer
from linvit.figures.photographs import View


@dataclass(frozen=True)
class Query:
    """Whose row is shown: the class token's, that of the patch at a pixel of the photograph, or the mean of all."""

    at: tuple[float, float] | None = None
    pooled: bool = False

    def weights(self, layer: SeenLayer, view: View) -> Tensor:
        """`(queries,)` of a layer."""
        if self.at is not None:
            return layer.one(layer.at(*view.to_input(*self.at), view.size))
        if self.pooled:
            return torch.full_like(layer.one(0), 1 / layer.grid.tokens)
        return layer.one(layer.class_token())

    def __str__(self) -> str:
        """As a title says it."""
        if self.at is not None:
            return "from the patch at {:g},{:g}".format(*self.at)
        return "mean of all queries" if self.pooled else "from the class token"


def usual_query(seen: Seen, view: View) -> Query:
    """The class token where there is one, else the middle of the photograph."""
    layer = usual_layer(seen)
    left, top, right, bottom = view.box
    return (
        Query() if layer.grid.prefix or layer.grid.tokens == 1 else Query(at=((left + right) / 2, (top + bottom) / 2))
    )


def usual_layer(seen: Seen) -> SeenLayer:
    """The last one whose queries see the whole picture, in a grid worth looking at."""
    placed = [layer for layer in seen.layers if layer.placed and layer.key_grid.patches > 1]
    if not placed:
        raise LinvitError("none of the model's attention layers has a known place in the picture")
    whole = [layer for layer in placed if layer.windows == 1]
    return (whole or placed)[-1]


def chosen_layers(seen: Seen, which: Sequence[str]) -> list[SeenLayer]:
    """The layers asked for by number or name; `all` is every one that can be drawn, none the usual one."""
    if not which:
        return [usual_layer(seen)]
    if list(which) == ["all"]:
        return [layer for layer in seen.layers if layer.placed]
    return [seen.layer(name) for name in which]


def chosen_map(seen: Seen, layer: SeenLayer, view: View, query: Query, rollout: bool = False) -> Tensor:
    """`(heads, height, width)` of a layer's map for a query; of a rollout, which averages the heads, `(1, …)`."""
    weights = query.weights(layer, view)
    return layer.picture(seen.rollout(layer, weights)[None] if rollout else layer.pull(weights))


def chosen_heads(pictures: Tensor, head: str) -> list[tuple[str, Tensor]]:
    """One picture for each head asked for: their mean, all of them, or one by number."""
    heads = pictures.shape[0]
    if head == "mean":
        return [("", pictures.mean(0))]
    if head == "all":
        return [(f"head {number}", pictures[number]) for number in range(heads)]
    if not head.isdecimal():
        raise LinvitError(f"--head is mean, all or a number, got '{head}'")
    if int(head) >= heads:
        raise LinvitError(f"there is no head {head}: the layer has 0 to {heads - 1}")
    return [(f"head {head}", pictures[int(head)])]
