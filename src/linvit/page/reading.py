"""What is drawn of a look: rows of maps and colours of features, as few bytes."""

import base64
import struct
from typing import Any

import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.figures.attention import SeenLayer
from linvit.figures.attention.basis import Basis
from linvit.page.sides import Look

SHOWN = ("attention", "rollout", "similarity")


def row(look: Look, layer: SeenLayer, show: str, query: str, head: str) -> tuple[tuple[int, int, int], Tensor]:
    """What the page draws over a picture: numbers for prefix tokens and then for patches, with how many prefix tokens,
    rows and columns they are.

    `query` is a place `x,y` as shares of width and height, `class` for the class token, or `all`. Attention is of one
    head or their `mean`; rollout averages heads; similarity is the cosine between the features of patches."""
    if show not in SHOWN:
        raise LinvitError(f"there is attention, rollout and similarity to show, not '{show}'")
    at = place(query, layer, look)
    if show == "similarity":
        grid = (0, layer.grid.height, layer.grid.width)
        return grid, cosine(layer, None if at is None else at - layer.grid.prefix)
    grid = (layer.key_grid.prefix, layer.key_grid.height, layer.key_grid.width)
    weights = torch.full_like(layer.one(0), 1 / layer.grid.tokens) if at is None else layer.one(at)
    if show == "rollout":
        return grid, look.seen.rollout(layer, weights)
    heads = layer.pull(weights)
    if head == "mean":
        return grid, heads.mean(0)
    if not head.isdecimal() or int(head) >= layer.heads:
        raise LinvitError(f"there is no head {head}: {layer.name} has 0 to {layer.heads - 1}")
    return grid, heads[int(head)]


def place(query: str, layer: SeenLayer, look: Look) -> int | None:
    """The query that is meant; none for all of them."""
    if query == "all":
        return None
    if query == "class":
        return layer.class_token()
    try:
        x, y = (float(part) for part in query.split(","))
    except ValueError:
        raise LinvitError(f"a query is a place such as 0.5,0.5, class or all, not '{query}'") from None
    if not (0 <= x < 1 and 0 <= y < 1):
        raise LinvitError(f"the place {query} is outside the picture: both numbers are from 0 to 1")
    height, width = look.seen.size
    return layer.at(x * width, y * height, look.seen.size)


def cosine(layer: SeenLayer, patch: int | None) -> Tensor:
    """Of a patch's features with all others', or of their mean's."""
    features = features_of(layer)
    if patch is not None and patch < 0:
        raise LinvitError("the class token's features are not kept: point at a patch")
    one = features.mean(0) if patch is None else features[patch]
    return torch.cosine_similarity(features, one[None], dim=-1)


def features_of(layer: SeenLayer) -> Tensor:
    features = layer.patch_features()
    if features is None:
        raise LinvitError(f"the block of {layer.name} puts out no vector for each patch: choose another layer")
    return features.float()


def packed(grid: tuple[int, int, int], values: Tensor) -> bytes:
    """Three numbers and then the values, as the page reads them."""
    return struct.pack("<3i", *grid) + values.detach().float().cpu().numpy().astype("<f4").tobytes()


def colours(layers: list[SeenLayer]) -> dict[str, Any]:
    """The principal components of the first layer's features as red, green and blue, of the others too. Layers of
    another width have a basis of their own."""
    found = [features_of(layer) for layer in layers]
    shared = len({features.shape[-1] for features in found}) == 1
    first = Basis.of(found[0])
    pictures = []
    for layer, features in zip(layers, found, strict=True):
        basis = first if shared else Basis.of(features)
        rgb = (255 * basis.colours(features)).round().byte().cpu().numpy().tobytes()
        grid = {"height": layer.grid.height, "width": layer.grid.width}
        pictures.append({**grid, "rgb": base64.b64encode(rgb).decode()})
    return {"shared": shared, "pictures": pictures}
