"""The maps of several models on the same photographs, and the numbers of each beside the first one's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from linvit.figures.attention.capture import Seen, look
from linvit.figures.attention.choosing import Query, chosen_heads, chosen_layers, chosen_map, usual_layer, usual_query
from linvit.figures.attention.drawing import LayerNumbers, MapRow
from linvit.figures.attention.layer import SeenLayer
from linvit.figures.attention.statistics import MapDistance, Rows, means
from linvit.figures.photographs import View


@dataclass
class ComparedMaps:
    """What is drawn: rows of maps, numbers by model and layer, and what the maps do not show."""

    query: str
    rows: list[MapRow]
    numbers: dict[str, list[LayerNumbers]]
    notes: dict[str, str] = field(default_factory=dict)


def compare_maps(
    models: Mapping[str, nn.Module],
    views: Sequence[View],
    query: Query | None,
    layers: Sequence[str] = (),
    head: str = "mean",
    rollout: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> ComparedMaps:
    """Maps for a query, the class token's or the middle's where none is given. Numbers are means over the views."""
    rows: list[MapRow] = []
    notes: dict[str, str] = {}
    numbers: dict[str, list[list[LayerNumbers]]] = {name: [] for name in models}
    for view in views:
        drawn: dict[tuple[str, str], dict[str, Tensor]] = {}
        first: Seen | None = None
        known: dict[int, Rows] = {}
        for name, model in models.items():
            seen = look(model, view.input(model))
            if first is None:
                first, asked = seen, query or usual_query(seen, view)
                wanted = chosen_layers(seen, layers)
            for layer in wanted:
                own = counterpart(seen, layer, first)
                notes |= {name: own.note} if own.note else {}
                for label, picture in chosen_heads(chosen_map(seen, own, view, asked, rollout), head):
                    drawn.setdefault((f"layer {layer.index}", label), {})[name] = picture
            numbers[name].append(layer_numbers(seen, known, first is seen))
            advance()
        mark = None if asked.at is None else view.to_input(*asked.at)
        for (layer_label, head_label), maps in drawn.items():
            label = "\n".join(part for part in (view.name, layer_label, head_label) if part)
            rows.append(MapRow(label, view, maps, mark))
    return ComparedMaps(str(asked), rows, {name: averaged(found) for name, found in numbers.items()}, notes)


def counterpart(seen: Seen, layer: SeenLayer, first: Seen) -> SeenLayer:
    """The same layer of another model: by name, else by number, else the usual one."""
    same = next((own for own in seen.layers if own.name == layer.name), None)
    if same is None and len(seen.layers) == len(first.layers):
        same = seen.layers[layer.index]
    return usual_layer(seen) if same is None else same


def layer_numbers(seen: Seen, known: dict[int, Rows], is_first: bool) -> list[LayerNumbers]:
    """Of every layer that has a place in the picture. The first model's rows become `known`, for the others."""
    found = []
    for layer in seen.layers:
        if not layer.placed or layer.grid.patches < 2:
            continue
        rows = Rows(layer, seen.size)
        apart = None if is_first or layer.index not in known else rows.distance_to(known[layer.index])
        found.append(LayerNumbers(layer.index, layer.name, layer.mechanism.name, rows.statistics(), apart))
        if is_first:
            known[layer.index] = rows
    return found


def averaged(views: Sequence[list[LayerNumbers]]) -> list[LayerNumbers]:
    """The means over photographs."""
    found = []
    for same in zip(*views, strict=True):
        apart = [row.distance for row in same if row.distance is not None]
        distance = means(MapDistance, apart) if len(apart) == len(same) else None
        statistics = means(type(same[0].statistics), [row.statistics for row in same])
        found.append(LayerNumbers(same[0].index, same[0].name, same[0].mechanism, statistics, distance))
    return found
