"""One forward of a model, of which every attention layer's q, k and v are kept."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import Mechanism, TokenGrid
from linvit.conversion import find_hosts
from linvit.conversion.convert import no_hosts
from linvit.conversion.dry_run import image_part
from linvit.conversion.host import Host
from linvit.conversion.hosts.pooled import HieraHost
from linvit.conversion.planning.costs import host_every_layer
from linvit.conversion.refusing import told
from linvit.errors import LinvitError, unknown
from linvit.figures.attention.layer import SeenLayer
from linvit.figures.attention.placing import (
    Places,
    places_in_hiera,
    places_of_windows,
    pooled_places,
    row_by_row,
    sequence_grid,
)
from linvit.measurement.macs import evaluating

MOST_PREFIX = 17  # class and register tokens


@dataclass(frozen=True)
class Seen:
    """What every attention layer of a model saw of one image, whose height and width `size` are."""

    layers: list[SeenLayer]
    size: tuple[int, int]

    def layer(self, which: str | int = -1) -> SeenLayer:
        """A layer by number, from the end if negative, or by name."""
        names = [layer.name for layer in self.layers]
        if str(which) in names:
            return self.layers[names.index(str(which))]
        try:
            return self.layers[int(which)]
        except ValueError:
            raise unknown("layer", str(which), names) from None
        except IndexError:
            raise LinvitError(f"there is no layer {which}: the model has 0 to {len(names) - 1}") from None

    def rollout_layers(self, last: SeenLayer) -> list[SeenLayer]:
        """Those that attention rollout goes through, from `last` back to where the grid changes."""
        found: list[SeenLayer] = []
        for layer in reversed(self.layers[: self.layers.index(last) + 1]):
            if not layer.grid == layer.key_grid == last.grid or not layer.mechanism.capabilities.map:
                break
            found.append(layer)
        if not found:
            why = "has no map" if last.grid == last.key_grid else "has other keys than queries"
            raise LinvitError(f"{last.name} {why}: attention rollout cannot go through it, choose another layer")
        return found

    def rollout(self, last: SeenLayer, weights: Tensor) -> Tensor:
        """Attention rollout (Abnar and Zuidema): `weights`, `(queries,)` of the last layer, times ½·(map + identity)
        of each layer back to the first on its grid. One vector passes, so no product of maps is made; heads are
        averaged, and rows divided by their sums where these are positive."""
        for layer in self.rollout_layers(last):
            sums = layer.row_sums()
            scaled = torch.where(sums > 0, weights / sums.clamp_min(1e-12), weights)
            weights = 0.5 * (weights + layer.pull(scaled).mean(0))
        return weights


@dataclass
class RecordedCall:
    """What was kept of a layer's call."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    features: Tensor | None = None


def watchable(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """The model, or a twin that computes the same and whose every attention layer has a mechanism of ours. Of a
    detector or a segmenter it is the backbone."""
    part = image_part(model)
    hosts = find_hosts(part)
    if not hosts:
        raise no_hosts(part)
    if all(isinstance(module, Host) for _, module in hosts):
        return part
    twin = copy.deepcopy(part)
    host_every_layer(twin, size)
    return twin


@torch.no_grad()
def look(model: nn.Module, image: Tensor) -> Seen:
    """What the attention layers of a model see of an image, `(1, channels, height, width)` as the model takes it. The
    model, converted or not, stays as it is."""
    if image.ndim != 4 or image.shape[0] != 1:
        raise LinvitError(f"look takes one image (1, channels, height, width), got shape {tuple(image.shape)}")
    size = (image.shape[-2], image.shape[-1])
    with told(size):
        watched = watchable(model, size)
        with evaluating(watched):
            calls = record(watched, image)
            hosts: dict[str, Any] = dict(find_hosts(watched))
            cut = {name for name, call in calls.items() if in_windows(call) and not isinstance(hosts[name], HieraHost)}
            places = places_of_windows(watched, image, cut) if cut else {}
    layers: list[SeenLayer] = []
    for name, call in calls.items():
        layers.append(made(len(layers), name, hosts[name], call, places.get(name), size))
    if not layers:
        raise LinvitError(f"{type(model).__name__} calls none of its attention layers for an image of {size}")
    return Seen(layers, size)


def record(model: nn.Module, image: Tensor) -> dict[str, RecordedCall]:
    """The first call of each layer's mechanism, and what the block around the layer puts out."""
    calls: dict[str, RecordedCall] = {}
    handles = []
    hosts: list[tuple[str, Any]] = list(find_hosts(model))
    for name, host in hosts:

        def see(mechanism: nn.Module, args: Any, named: Any, name: str = name) -> None:
            calls.setdefault(name, RecordedCall(args, named))

        def see_block(block: nn.Module, args: Any, out: Any, name: str = name) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if name in calls and isinstance(out, Tensor) and calls[name].features is None:
                calls[name].features = out

        handles.append(host.mechanism.register_forward_pre_hook(see, with_kwargs=True))
        if "." in name:
            handles.append(model.get_submodule(name.rpartition(".")[0]).register_forward_hook(see_block))
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def in_windows(call: RecordedCall) -> bool:
    return call.args[0].shape[0] > 1


def made(index: int, name: str, host: Any, call: RecordedCall, keys: Places | None, size: tuple[int, int]) -> SeenLayer:
    """A layer from its call; where its windows lie decides what its queries and keys are numbered by."""
    (q, k, v, grid), given = (*call.args, None)[:4], {n: value for n, value in call.named.items() if value is not None}
    grid = given.pop("grid", grid)
    mechanism: Mechanism = host.mechanism
    queries, features = None, call.features
    if isinstance(host, HieraHost):
        queries, keys = places_in_hiera(host, q.shape[2], k.shape[2], q.shape[0])
        features = None if features is None else row_by_row(host, features)
    elif in_windows(call) and keys is not None:
        inner = grid or TokenGrid.line(q.shape[2])
        queries = pooled_places(keys, inner, given.get("key_grid") or inner)
        if queries.index.shape != q.shape[::2] or keys.index.shape != k.shape[::2]:
            queries = keys = None
    if keys is None or queries is None:
        whole = grid or unplaced_grid(q.shape[2], size)
        key_grid = given.get("key_grid") or (whole if k.shape[2] == q.shape[2] else unplaced_grid(k.shape[2], size))
        return SeenLayer(index, name, mechanism, q, k, v, whole, key_grid, grid, given, features=features)
    return SeenLayer(
        index, name, mechanism, q, k, v, queries.grid, keys.grid, grid, given, queries, keys, features=features
    )


def unplaced_grid(tokens: int, size: tuple[int, int]) -> TokenGrid:
    """The grid of tokens of which a mechanism was told none: patches of the picture, behind a few others; or a line."""
    for prefix in range(min(tokens, MOST_PREFIX)):
        grid = sequence_grid(tokens - prefix, size)
        if grid is not None:
            return replace(grid, prefix=prefix)
    return TokenGrid.line(tokens)
