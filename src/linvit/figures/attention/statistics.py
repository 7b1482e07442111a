"""What a map is like, in numbers, over queries spread evenly over the picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from linvit.attention import TokenGrid
from linvit.figures.attention.layer import SeenLayer

T = TypeVar("T")
QUERIES = 32  # whose rows are looked at


@dataclass(frozen=True)
class LayerStatistics:
    """Means over queries and heads, of each row's sizes as shares of their sum."""

    entropy: float  # in nats; that of a row that takes from all keys alike is the logarithm of their number
    effective_rank: float  # of these rows: how many directions they have (Roy and Vetterli)
    distance: float  # between a query and what it takes from, in pixels of the model's input


@dataclass(frozen=True)
class MapDistance:
    """Between two models' maps of a layer, mean over queries and heads."""

    total_variation: float  # 0 for the same shares, 1 where they have no key in common
    cosine: float


class Rows:
    """The rows of some queries of a layer, `(heads, queries, keys)`, of an input of this height and width."""

    def __init__(self, layer: SeenLayer, size: tuple[int, int], queries: int = QUERIES) -> None:
        self.layer, self.size = layer, size
        self.queries = spread_queries(layer.grid, queries)

    @cached_property
    def rows(self) -> Tensor:
        return self.layer.rows(self.queries)

    @property
    def shares(self) -> Tensor:
        """Signs left out, each row by its sum."""
        sizes = self.rows.abs()
        return sizes / sizes.sum(-1, keepdim=True).clamp_min(1e-30)

    def statistics(self) -> LayerStatistics:
        """Entropy, effective rank and distance."""
        shares = self.shares
        entropy = torch.special.entr(shares).sum(-1).mean()
        singular = torch.linalg.svdvals(self.rows.double())
        weights = singular / singular.sum(-1, keepdim=True).clamp_min(1e-30)
        rank = torch.special.entr(weights).sum(-1).exp().mean()
        apart = pixel_distances(self.layer, self.queries, self.size).to(shares)
        patches = shares[..., self.layer.key_grid.prefix :]
        taken = (patches * apart).sum(-1) / patches.sum(-1).clamp_min(1e-30)
        return LayerStatistics(float(entropy), float(rank), float(taken.mean()))

    def distance_to(self, other: "Rows") -> MapDistance | None:
        """How far the maps of two models' layers are apart; none where these look at other keys or have other heads."""
        mine, theirs = self.shares, other.shares
        if mine.shape != theirs.shape:
            return None
        variation = (mine - theirs).abs().sum(-1).mean() / 2
        return MapDistance(float(variation), float(torch.cosine_similarity(mine, theirs, dim=-1).mean()))


def spread_queries(grid: TokenGrid, queries: int) -> list[int]:
    """So many patches at even distances over the grid, or all of them, by their numbers."""
    if grid.patches <= queries:
        return list(range(grid.prefix, grid.tokens))
    golden = (math.sqrt(5) - 1) / 2
    found = [
        int((i + 0.5) / queries * grid.height) * grid.width + int((i * golden + 0.5) % 1 * grid.width)
        for i in range(queries)
    ]
    return sorted({grid.prefix + place for place in found})


def pixel_distances(layer: SeenLayer, queries: list[int], size: tuple[int, int]) -> Tensor:
    """`(queries, key patches)`: between the middles of their patches."""
    own = torch.tensor([query - layer.grid.prefix for query in queries])
    here, there = centres(layer.grid, size)[own], centres(layer.key_grid, size)
    return torch.cdist(here, there)


def centres(grid: TokenGrid, size: tuple[int, int]) -> Tensor:
    """`(patches, 2)`: row and column of the middle of each patch, in pixels."""
    rows, columns = (
        (torch.arange(n) + 0.5) * side / n for n, side in zip((grid.height, grid.width), size, strict=True)
    )
    return torch.cartesian_prod(rows, columns)


def means(kind: type[T], records: Sequence[T]) -> T:
    """The mean of each number."""
    return kind(**{name: sum(vars(record)[name] for record in records) / len(records) for name in vars(records[0])})
