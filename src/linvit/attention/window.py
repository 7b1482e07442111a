"""Window attention (Swin Transformer, Liu et al.), also the Fair Comparison's Swin row: softmax within windows.

    out_i = softmax over the j in i's window of (q_i · k_jᵀ / √d + b[place of i − place of j]) · v_j

Linear in N because a window has a fixed size. `shift` moves the windows by half their size (or by the number given) as
every other block of Swin does; tokens that wrap round the edge share a window with strangers and do not see them.
`bias` adds Swin's learned table b. The defaults are the Fair Comparison's code, which has neither bias nor
shift although its poster says shifted.

Grids that do not divide are padded, and nobody sees the padding. Along a side no longer than the window, the window
shrinks to the grid and does not shift, as in Swin; the table's middle part then serves. Prefix tokens, which Swin does
not have, see every token and are seen by all (inferred).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.grid import TokenGrid
from linvit.attention.mechanism import Call, Capabilities, Mechanism, Shape, Size
from linvit.attention.registry import register
from linvit.errors import LinvitError


@register("window", paper="Swin Transformer; Fair Comparison (Swin)")
class Window(Mechanism):
    capabilities = Capabilities(grid=True, equivariant=False, unequal=False)
    examples = (
        {"window": 2},
        {"window": (2, 3), "shift": True},
        {"window": 3, "shift": 2, "bias": True},
    )

    def __init__(
        self,
        shape: Shape,
        *,
        window: int | tuple[int, int] = 7,
        shift: bool | int = False,
        bias: bool = False,
    ) -> None:
        super().__init__(shape)
        self.height, self.width = (window, window) if isinstance(window, int) else window
        self.shift = (self.height // 2, self.width // 2) if shift is True else (int(shift), int(shift))
        if min(self.height, self.width) < 1 or not all(
            0 <= s < side for s, side in zip(self.shift, (self.height, self.width), strict=True)
        ):
            raise LinvitError(f"window={window} must be at least 1 and shift={shift} less than that")
        self.table = None
        if bias:
            self.require("heads")
            offsets = (2 * self.height - 1) * (2 * self.width - 1)
            self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(offsets, shape.heads or 1), std=0.02))

    def tiling(self, grid: TokenGrid) -> Tiling:
        rows, columns = self.shift
        return Tiling(
            grid,
            min(self.height, grid.height),
            min(self.width, grid.width),
            rows if grid.height > self.height else 0,
            columns if grid.width > self.width else 0,
        )

    def place_bias(self, tiling: Tiling, table: Tensor) -> Tensor:
        """Swin's table looked up for every pair of places in a window: `(heads, 1, places, places)`."""
        rows = torch.arange(tiling.height, device=table.device).repeat_interleave(tiling.width)
        columns = torch.arange(tiling.width, device=table.device).repeat(tiling.height)
        down = rows[:, None] - rows + self.height - 1
        right = columns[:, None] - columns + self.width - 1
        return table[down * (2 * self.width - 1) + right].permute(2, 0, 1).unsqueeze(1)

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        grid, tiling = call.grid, self.tiling(call.grid)
        q = q * q.shape[-1] ** -0.5
        (q_prefix, q_patches), (k_prefix, k_patches), (v_prefix, v_patches) = (grid.split(t) for t in (q, k, v))
        scores = tiling.cut(q_patches) @ beside(k_prefix, tiling.cut(k_patches)).transpose(-2, -1)
        if self.table is not None:
            scores = scores + F.pad(self.place_bias(tiling, self.table.to(q.dtype)), (grid.prefix, 0))
        mask = q.new_ones(1, grid.tokens, dtype=torch.bool) if call.mask is None else call.mask
        mask_prefix, mask_patches = grid.split(mask[:, None, :, None])
        seen = tiling.neighbours(q.device) & tiling.cut(mask_patches).transpose(-2, -1)
        seen_prefix = mask_prefix.transpose(-2, -1).unsqueeze(2).expand(-1, -1, *seen.shape[2:4], -1)
        weights = masked_softmax(scores, torch.cat((seen_prefix, seen), dim=-1))
        out = tiling.join(weights @ beside(v_prefix, tiling.cut(v_patches)))
        if not grid.prefix:
            return out
        everywhere = masked_softmax(q_prefix @ k.transpose(-2, -1), mask[:, None, None, :])
        return torch.cat((everywhere @ v, out), dim=2)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        identity = torch.eye(k.shape[2], dtype=q.dtype, device=q.device)
        return self.core(q, k, identity.expand(*k.shape[:3], -1), call)

    def macs(self, size: Size) -> int:
        tiling, prefix = self.tiling(size.grid), size.grid.prefix
        places = tiling.height * tiling.width
        pairs = tiling.rows * tiling.columns * places * (prefix + places) + prefix * size.keys
        return size.batch * size.heads * pairs * (size.head_dim + size.value_dim)


@dataclass(frozen=True)
class Tiling:
    """How a grid falls into windows of height × width, moved down and right by the shifts and wrapped round."""

    grid: TokenGrid
    height: int
    width: int
    down: int
    right: int

    @property
    def rows(self) -> int:
        return -(-self.grid.height // self.height)

    @property
    def columns(self) -> int:
        return -(-self.grid.width // self.width)

    def cut(self, x: Tensor) -> Tensor:
        """Patches `(batch, heads, patches, channels)` as `(batch, heads, windows, places, channels)`, zeros behind."""
        below, beyond = self.rows * self.height - self.grid.height, self.columns * self.width - self.grid.width
        x = F.pad(x.unflatten(2, (self.grid.height, self.grid.width)), (0, 0, 0, beyond, 0, below))
        x = x.roll((-self.down, -self.right), (2, 3))
        x = x.unflatten(3, (self.columns, self.width)).unflatten(2, (self.rows, self.height)).transpose(3, 4)
        return x.flatten(2, 3).flatten(3, 4)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `cut`."""
        x = x.unflatten(3, (self.height, self.width)).unflatten(2, (self.rows, self.columns)).transpose(3, 4)
        x = x.flatten(4, 5).flatten(2, 3).roll((self.down, self.right), (2, 3))
        return x[:, :, : self.grid.height, : self.grid.width].flatten(2, 3)

    def neighbours(self, device: torch.device) -> Tensor:
        """Which places of a window see each other, `(1, 1, windows, places, places)`: not across the wrap."""
        wrapped_down = torch.arange(self.grid.height, device=device) < self.down
        wrapped_right = torch.arange(self.grid.width, device=device) < self.right
        side = 1 + 2 * wrapped_down[:, None].long() + wrapped_right.long()  # 0 is left for the padding
        side = self.cut(side.reshape(1, 1, -1, 1))
        return (side == side.transpose(-2, -1)) & (side > 0).transpose(-2, -1)


def beside(prefix: Tensor, windows: Tensor) -> Tensor:
    """Prefix tokens put before the tokens of every window."""
    return torch.cat((prefix.unsqueeze(2).expand(-1, -1, windows.shape[2], -1, -1), windows), dim=3)


def masked_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Softmax over what is seen; a row that sees nothing is zero, and so are its gradients."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~seen, 0.0)
