"""The layout of tokens."""

from dataclasses import dataclass

from torch import Tensor

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
        return picture.reshape(picture.shape[0], heads, -1, self.patches).transpose(2, 3)

    def __str__(self) -> str:
        return f"{self.prefix} + {self.height}×{self.width}" if self.prefix else f"{self.height}×{self.width}"
