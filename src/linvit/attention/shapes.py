"""The shapes of attention: the grid that tokens lie on, what a mechanism is built for, and the size of one call."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from linvit.attention.options import Count
from linvit.codec import check_fields
from linvit.errors import LinvitError


@dataclass(frozen=True)
class TokenGrid:
    """The layout of a token sequence: `prefix` tokens first, then the patches row by row."""

    height: int
    width: int
    prefix: int = 0

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or self.prefix < 0:
            raise LinvitError(f"a token grid needs height and width of at least 1 and no negative prefix, got {self}")

    @classmethod
    def line(cls, tokens: int) -> "TokenGrid":
        """A plain sequence, for mechanisms that do not look at the grid."""
        return cls(1, tokens)

    @property
    def patches(self) -> int:
        return self.height * self.width

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Prefix tokens and patch tokens of `x`, whose second last axis is tokens."""
        return x[..., : self.prefix, :], x[..., self.prefix :, :]

    def to_map(self, x: Tensor) -> Tensor:
        """Patch tokens `(batch, heads, patches, channels)` as a picture `(batch, heads · channels, height, width)`."""
        batch, heads, _, channels = x.shape
        return x.transpose(2, 3).reshape(batch, heads * channels, self.height, self.width)

    def from_map(self, picture: Tensor, heads: int) -> Tensor:
        """The inverse of `to_map`: `(batch, heads, patches, channels)`."""
        batch, channels = picture.shape[:2]
        return picture.reshape(batch, heads, channels // heads, self.patches).transpose(2, 3)

    def __str__(self) -> str:
        return f"{self.prefix} + {self.height}×{self.width}" if self.prefix else f"{self.height}×{self.width}"


@dataclass(frozen=True)
class Shape:
    """What a mechanism is built for. A mechanism without parameters needs none of it."""

    heads: Count | None = None
    head_dim: Count | None = None
    value_dim: Count | None = None
    dim: Count | None = None  # channels of the block's input
    grid: TokenGrid | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim or 0

    @property
    def channels(self) -> int:
        """Channels of the block's input; heads × head_dim unless told otherwise."""
        return self.dim or (self.heads or 0) * (self.head_dim or 0)


@dataclass(frozen=True)
class Size:
    """The size of one call, for counting."""

    batch: int
    heads: int
    head_dim: int
    value_dim: int
    grid: TokenGrid
    key_grid: TokenGrid

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid | None = None, key_grid: TokenGrid | None = None, **_: Any
    ) -> "Size":
        """The size of a call of a mechanism with these arguments."""
        grid = grid or TokenGrid.line(q.shape[2])
        key_grid = key_grid or (grid if k.shape[2] == q.shape[2] else TokenGrid.line(k.shape[2]))
        return cls(q.shape[0], q.shape[1], q.shape[3], v.shape[3], grid, key_grid)

    @property
    def queries(self) -> int:
        return self.grid.tokens

    @property
    def keys(self) -> int:
        return self.key_grid.tokens
