"""Window attention (Swin Transformer, Liu et al.), also the Fair Comparison's Swin row: softmax within windows.

    out_i = softmax over the j in i's window of (q_i · k_jᵀ / √d + b[place of i − place of j]) · v_j

Linear in N because a window has a fixed size. `shift` moves the windows by half their size (or by the number given) as
every other block of Swin does; tokens that wrap round the edge share a window with strangers and do not see them.
`bias` adds Swin's learned table b. The defaults are the Fair Comparison's code, which has neither bias nor shift
although its poster says shifted.

Grids that do not divide are padded, then shifted, and nobody sees the padding. Along a side no longer than the window,
the window shrinks to the grid and does not shift, as in Swin; the table's middle part then serves. Prefix tokens, which
Swin does not have, see every token and are seen by all (inferred).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Mechanism, Shape, Size, TokenGrid, register
from linvit.attention.options import Range
from linvit.errors import LinvitError

Side = Annotated[int, Range(1, 1024)]
Shift = Annotated[int, Range(0, 1023)]


@register("window", paper="Swin Transformer; Fair Comparison (Swin)")
class Window(Mechanism):
    capabilities = Capabilities(grid=True, equivariant=False, unequal=False, rotary="products", dynamic=False)
    examples = ({"window": 2}, {"window": (2, 3), "shift": True}, {"window": 3, "shift": 2, "bias": True})

    def __init__(
        self, shape: Shape, *, window: Side | tuple[Side, Side] = 7, shift: bool | Shift = False, bias: bool = False
    ) -> None:
        super().__init__(shape)
        self.height, self.width = (window, window) if isinstance(window, int) else window
        self.shift = (self.height // 2, self.width // 2) if shift is True else (int(shift), int(shift))
        if not (0 <= self.shift[0] < self.height and 0 <= self.shift[1] < self.width):
            raise LinvitError(f"window={window} must be more than shift={shift}")
        self.table = None
        if bias:
            self.require("heads")
            offsets = (2 * self.height - 1) * (2 * self.width - 1)
            self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(offsets, shape.heads or 1), std=0.02))

    def tiling(self, grid: TokenGrid) -> "Tiling":
        down, right = self.shift[0] * (grid.height > self.height), self.shift[1] * (grid.width > self.width)
        return Tiling(grid, min(self.height, grid.height), min(self.width, grid.width), down, right)

    def place_bias(self, tiling: "Tiling", table: Tensor) -> Tensor:
        """Swin's table looked up for every pair of places in a window: `(1, heads, 1, places, places)`."""
        rows = torch.arange(tiling.height, device=table.device).repeat_interleave(tiling.width)
        columns = torch.arange(tiling.width, device=table.device).repeat(tiling.height)
        down = rows[:, None] - rows + self.height - 1
        right = columns[:, None] - columns + self.width - 1
        return table[down * (2 * self.width - 1) + right].permute(2, 0, 1)[None, :, None]

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.mix(q, k, v, call, attend)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        if call.mask is not None:
            return "PyTorch's own attention has no answer for windows in which a key mask leaves nothing"
        return self.mix(q, k, v, call, attend_fused)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, call: Call, attention: Callable[..., Tensor]) -> Tensor:
        grid, tiling = call.grid, self.tiling(call.grid)
        (q_prefix, q_patches), (k_prefix, k_patches), (v_prefix, v_patches) = (grid.split(t) for t in (q, k, v))
        bias = None if self.table is None else F.pad(self.place_bias(tiling, self.table.to(q.dtype)), (grid.prefix, 0))
        seen = seen_by_prefix = None
        if call.mask is not None:
            seen_by_prefix = call.mask[:, None, None, None, :]
            mask_prefix, mask_patches = grid.split(call.mask[:, None, :, None])
            seen = beside(mask_prefix, tiling.cut(mask_patches)).transpose(-2, -1)
        if not tiling.plain:
            near = F.pad(tiling.neighbours(q.device), (grid.prefix, 0), value=True)
            seen = near if seen is None else near & seen
        k_windows, v_windows = beside(k_prefix, tiling.cut(k_patches)), beside(v_prefix, tiling.cut(v_patches))
        out = tiling.join(attention(tiling.cut(q_patches), k_windows, v_windows, bias, seen))
        if not grid.prefix:
            return out
        all_tokens = (t.unsqueeze(2) for t in (q_prefix, k, v))
        return torch.cat((attention(*all_tokens, None, seen_by_prefix).squeeze(2), out), dim=2)

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

    @property
    def plain(self) -> bool:
        """Neither padding nor a shift: all places of a window see each other."""
        padded = self.grid.height % self.height or self.grid.width % self.width
        return not (padded or self.down or self.right)

    def cut(self, x: Tensor) -> Tensor:
        """Patches `(batch, heads, patches, channels)` as `(batch, heads, windows, places, channels)`, zeros behind."""
        below, beyond = self.rows * self.height - self.grid.height, self.columns * self.width - self.grid.width
        x = x.unflatten(2, (self.grid.height, self.grid.width))
        if below or beyond:
            x = F.pad(x, (0, 0, 0, beyond, 0, below))
        x, images = self.rolled(x, -self.down, -self.right), x.shape[:2]
        x = x.flatten(0, 1)  # with both there would be seven dimensions, and XNNPACK has six
        x = x.unflatten(2, (self.columns, self.width)).unflatten(1, (self.rows, self.height)).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2).unflatten(0, images)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `cut`."""
        images = x.shape[:2]
        x = x.flatten(0, 1).unflatten(2, (self.height, self.width)).unflatten(1, (self.rows, self.columns))
        x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2).unflatten(0, images)
        x = self.rolled(x, self.down, self.right)
        return x[:, :, : self.grid.height, : self.grid.width].flatten(2, 3)

    def rolled(self, x: Tensor, down: int, right: int) -> Tensor:
        """Moved along the grid, round its edges; by nothing, it is not copied."""
        return x.roll((down, right), (2, 3)) if down or right else x

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


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None) -> Tensor:
    """Softmax attention in every window over what is seen; where nothing is, the output and its gradients are zero."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if seen is None:
        return scores.softmax(-1) @ v
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~seen, 0.0) @ v


def attend_fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None) -> Tensor:
    """The same by PyTorch's kernels, windows beside heads; only padding may see nothing."""
    if seen is not None:
        nothing = q.new_full((), torch.finfo(q.dtype).min)
        bias = torch.where(seen, torch.zeros_like(nothing) if bias is None else bias, nothing)
    if bias is not None:
        bias = bias.expand(-1, *q.shape[1:3], -1, -1).flatten(1, 2)
    out = F.scaled_dot_product_attention(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), attn_mask=bias)
    return out.unflatten(1, q.shape[1:3])
