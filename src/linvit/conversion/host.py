"""What a host is: the block of a model that owns the projections around a mechanism.

A host is a subclass of the timm module it stands for. Converting changes the module's class in place and hangs the
mechanism in, so every weight, name and hook of the original stays where it was and an original checkpoint still loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Mechanism, Shape, TokenGrid
from linvit.errors import LinvitError


@dataclass(frozen=True)
class Ask:
    """Something the original attention does that not every mechanism can honour. `drop` names what may be given up."""

    feature: str
    honoured_by: Callable[[Mechanism], bool]
    droppable: bool = True


def bias_ask(feature: str) -> Ask:
    """A bias on the logits: exact in mechanisms that have logits."""
    return Ask(feature, lambda mechanism: mechanism.capabilities.bias)


def unequal_ask(feature: str, droppable: bool) -> Ask:
    """Queries and keys that differ in number."""
    return Ask(feature, lambda mechanism: mechanism.capabilities.unequal, droppable)


class Grids:
    """The grid of the image now passing through, for hosts that only see a sequence. A hook on the stem writes it."""

    def __init__(self, prefix: int = 0) -> None:
        self.prefix = prefix
        self.grid: TokenGrid | None = None

    def before_patches(self, embed: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook for timm's PatchEmbed: the image size tells the grid."""
        size = (args[0].shape[-2], args[0].shape[-1])
        if isinstance(embed, PatchEmbed):
            size = embed.dynamic_feat_size(size)
        self.grid = TokenGrid(size[0], size[1], self.prefix)

    def after_stem(self, stem: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        """Forward hook for a convolutional stem with pictures as output."""
        self.grid = TokenGrid(out.shape[-2], out.shape[-1], self.prefix)


class Host(nn.Module):
    """Base of the hosts, mixed into a timm attention class. Static methods take the module before it is a host."""

    original: ClassVar[type[nn.Module]]
    native: ClassVar[str] = "softmax"
    mechanism: Mechanism
    grids: Grids | None = None
    given_up: tuple[str, ...] = ()  # what was dropped here, by all conversions so far

    @staticmethod
    def shape(module: Any) -> Shape:
        """Heads and widths, for building a mechanism."""
        raise NotImplementedError

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        """What the module does beyond the plain mechanism."""
        return []

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        """Options the module itself brings along for this mechanism, below what the plan says."""
        return {}

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        """Remove the parameters of a dropped feature."""

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        """The key grid of a call with these arguments, for mechanisms whose parameters depend on it."""
        return None

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        """Once per model, after the swap: hooks for hosts that only see a sequence."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid | None,
        *,
        key_grid: TokenGrid | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Call the mechanism with what it takes. A sequence that left the grid (dropped patches) comes without one."""
        if grid is not None and grid.tokens != q.shape[2]:
            grid = None
        x = x if self.mechanism.capabilities.input else None
        return self.mechanism(q, k, v, grid, key_grid=key_grid, mask=mask, bias=bias, x=x)


def dropout_ask(module: Any) -> list[Ask]:
    """Dropout on attention weights, where the model was built with it."""
    rate = getattr(getattr(module, "attn_drop", None), "p", 0.0)
    return [Ask("attention_dropout", lambda mechanism: False)] if rate else []


def offset_bias(table: Tensor, resolution: tuple[int, int], keys: TokenGrid, stride: int = 1) -> Tensor:
    """The bias of LeViT and EfficientFormerV2, `(1, heads, queries, keys)`: one value for each |Δrow|, |Δcolumn|.

    Learned at `resolution`; on another grid the table is resized bilinearly, so that any input size works.
    """
    height, width = keys.height, keys.width
    if (height, width) != tuple(resolution):
        table = F.interpolate(table[None].unflatten(-1, tuple(resolution)), (height, width), mode="bilinear")
        table = table[0].flatten(-2)
    rows, columns = torch.arange(height, device=table.device), torch.arange(width, device=table.device)
    row = (rows[::stride, None] - rows[None, :]).abs()
    column = (columns[::stride, None] - columns[None, :]).abs()
    index = row[:, None, :, None] * width + column[None, :, None, :]
    queries = -(-height // stride) * -(-width // stride)
    return table[:, index.reshape(queries, keys.tokens)][None]


def refuse_mask(is_causal: bool) -> None:
    if is_causal:
        raise LinvitError("a converted model cannot run causally: images have no order")
