"""One attention layer and its map, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linvit.attention import Mechanism, TokenGrid
from linvit.attention.local import WithLocal
from linvit.attention.rows import each_row, pull, row_sums
from linvit.errors import LinvitError
from linvit.figures.attention.gradients import gradient_row
from linvit.figures.attention.placing import Places


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """A layer and what it saw. Queries and keys are numbered as on `grid` and `key_grid`, in windows or not: those of
    the whole picture, prefix tokens first."""

    index: int
    name: str
    mechanism: Mechanism = field(repr=False)
    q: Tensor = field(repr=False)
    k: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    grid: TokenGrid
    key_grid: TokenGrid
    call_grid: TokenGrid | None = field(repr=False)  # as the mechanism was told: of a window, or none
    given: dict[str, Any] = field(repr=False)  # what else it was told
    query_places: Places | None = field(default=None, repr=False)  # of windows, or of tokens in another order
    key_places: Places | None = field(default=None, repr=False)
    features: Tensor | None = field(default=None, repr=False)  # what the block around it put out

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def windows(self) -> int:
        """How many windows the picture is cut into; one where every query sees the whole of it."""
        return self.q.shape[0]

    @property
    def placed(self) -> bool:
        """Whether it is known where in the picture its queries and keys lie; else it has no rows."""
        in_reading_order = self.key_grid.height == 1 < self.grid.height  # averages over runs of tokens (NextViT)
        return self.key_places is not None or (self.windows == 1 and not in_reading_order)

    @property
    def note(self) -> str:
        """What the map does not show, in a few words."""
        mechanism = self.mechanism
        if not mechanism.capabilities.map:
            return f"{mechanism.name} has no map: how far a query's output depends on each token's q, k and v"
        inner = mechanism.inner if isinstance(mechanism, WithLocal) else mechanism
        left_out = ["its local filter"] if inner is not mechanism else []
        if type(inner).finish is not Mechanism.finish:
            left_out.append("its own output norm, gate or filter")
        return f"without {' and '.join(left_out)}" if left_out else ""

    def at(self, x: float, y: float, size: tuple[int, int]) -> int:
        """The query whose patch holds a pixel of an input of this height and width."""
        height, width = size
        if not (0 <= x < width and 0 <= y < height):
            raise LinvitError(f"{x:g},{y:g} is outside the picture, which is {width} pixels wide and {height} high")
        row, column = int(y * self.grid.height / height), int(x * self.grid.width / width)
        return self.grid.prefix + row * self.grid.width + column

    def class_token(self) -> int:
        """The class token's query."""
        if not self.grid.prefix and self.grid.tokens > 1:  # a single query is the class token
            raise LinvitError(f"{self.name} sees no class token: give a place in the picture, or pool over all queries")
        return 0

    def one(self, query: int) -> Tensor:
        """Weights that pick one query, `(queries,)`."""
        weights = self.q.new_zeros(self.grid.tokens, dtype=torch.float32)
        weights[query] = 1.0
        return weights

    def row(self, query: int) -> Tensor:
        """`(heads, keys)`: what one query takes from each key."""
        return self.pull(self.one(query))

    def rows(self, queries: Sequence[int]) -> Tensor:
        """`(heads, queries, keys)`: the rows of several queries."""
        if self.windows > 1 or self.key_places is not None or not (self.placed and self.mechanism.capabilities.map):
            return torch.stack([self.row(query) for query in queries], dim=1)
        return each_row(
            self.mechanism, queries, self.q, self.k, self.v.shape[-1], self.call_grid, **self.given
        )[0]  # fmt: skip

    def pooled(self) -> Tensor:
        """`(heads, keys)`: the mean of all queries' rows."""
        return self.pull(torch.full_like(self.one(0), 1 / self.grid.tokens))

    def pull(self, weights: Tensor) -> Tensor:
        """`weights · map`, `(queries,)` to `(heads, keys)`. A head that a mechanism cuts into several is their mean."""
        if not self.placed:
            raise LinvitError(f"where the keys of {self.name} lie in the picture is not known: choose another layer")
        if self.query_places is None or self.key_places is None:
            return self._pull(weights[None], torch.zeros(1, dtype=torch.long, device=weights.device))[0]
        inside = self.query_places.gather(weights)
        some = inside.any(1).nonzero()[:, 0]
        return self.key_places.scatter(self._pull(inside[some], some), some)

    def _pull(self, weights: Tensor, some: Tensor) -> Tensor:
        """`(some windows, queries)` to `(some windows, heads, keys)`."""
        q, k, v, given = self._windows(some)
        if self.mechanism.capabilities.map:
            return pull(self.mechanism, weights, q, k, v.shape[-1], self.call_grid, **given).mean(-1)
        found = torch.zeros_like(k[..., 0])
        for window, query in weights.nonzero().tolist():
            one = {name: take(name, value, torch.tensor([window])) for name, value in given.items()}
            here = slice(window, window + 1)
            row = gradient_row(self.mechanism, q[here], k[here], v[here], query, self.call_grid, one)
            found[window] += weights[window, query] * row
        return found

    def _windows(self, some: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        if self.windows == 1:
            return self.q, self.k, self.v, self.given
        given = {name: take(name, value, some) for name, value in self.given.items()}
        return self.q[some], self.k[some], self.v[some], given

    def row_sums(self) -> Tensor:
        """`(queries,)`: the sums of the map's rows, mean over the heads: one where a mechanism divides by them."""
        if self.mechanism.name == "softmax":
            return torch.ones_like(self.one(0))
        sums = row_sums(self.mechanism, self.q, self.k, self.v.shape[-1], self.call_grid, **self.given)
        if self.query_places is None:
            return sums[0]
        return self.query_places.scatter(sums[:, None], torch.arange(self.windows))[0]

    def picture(self, per_key: Tensor) -> Tensor:
        """`(…, keys)` as pictures `(…, height, width)`, without prefix tokens."""
        grid = self.key_grid
        return per_key[..., grid.prefix :].unflatten(-1, (grid.height, grid.width))

    def patch_features(self) -> Tensor | None:
        """`(patches, channels)`: what the block around the layer puts out at the queries, row by row; none where that
        is not one vector for each of them."""
        found, grid = self.features, self.grid
        if found is None or found.shape[0] != 1:
            return None
        if found.ndim == 4:
            sides = (grid.height, grid.width)
            if found.shape[1:3] != sides:
                found = found.permute(0, 2, 3, 1)
            return found[0].flatten(0, 1) if found.shape[1:3] == sides else None
        if found.ndim != 3 or found.shape[1] != grid.tokens:
            return None
        return found[0, grid.prefix :]


def take(name: str, value: Any, some: Tensor) -> Any:
    """What of an argument belongs to some windows. A bias may come for a few that repeat."""
    if not isinstance(value, Tensor):
        return value
    if name == "bias":
        value = value[(None,) * (4 - value.ndim)]
        return value if value.shape[0] == 1 else value[some % value.shape[0]]
    return value[some]
