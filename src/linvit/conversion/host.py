"""What a host is: the block of a model that owns the projections around a mechanism.

A host is a subclass of the timm module it stands for. Converting changes the module's class in place and hangs the
mechanism in, so every weight, name and hook of the original stays where it was and an original checkpoint still loads.
A family's file in `hosts/` has a class with its `original`, and what is its own: the rest is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Mechanism, Shape, TokenGrid
from linvit.conversion.grids import Grids, follow_grids
from linvit.errors import LinvitError


@dataclass(frozen=True)
class Ask:
    """Something the original attention does that not every mechanism can honour.

    With `keeps`, a mechanism that cannot honour it leaves the layer as it is, which the report says. What is
    `removable` is taken out where it is dropped, whatever the mechanism; else it only loses its meaning in mechanisms
    that cannot honour it.
    """

    feature: str
    honoured_by: Callable[[Mechanism], bool]
    droppable: bool = False
    removable: bool = False
    keeps: bool = False


def has_logits(mechanism: Mechanism) -> bool:
    return mechanism.capabilities.bias


def takes_unequal(mechanism: Mechanism) -> bool:
    return mechanism.capabilities.unequal


def asks_from_nowhere(mechanism: Mechanism) -> bool:
    """Whether a mechanism serves a single query that has no place among the keys."""
    can = mechanism.capabilities
    return can.unequal and can.equivariant and not can.grid


# What `drop` may name, whatever the model. Rotary position stays relative in mechanisms that know q and k by their
# products and norms; others see q and k rotated all the same.
FEATURES: dict[str, Ask] = {
    "relative_bias": Ask("relative_bias", has_logits, droppable=True, removable=True),
    "shift_mask": Ask("shift_mask", has_logits, droppable=True, removable=True),
    "talking_heads": Ask("talking_heads", lambda m: m.name == "softmax", droppable=True, removable=True),
    "pooling": Ask("pooling", takes_unequal, droppable=True, removable=True),
    "rotary": Ask("rotary", lambda m: m.capabilities.rotary, droppable=True),
    "temperature": Ask(
        "temperature", lambda m: m.name == "xca" and m.variant == "fair", droppable=True, removable=True
    ),
    "attention_dropout": Ask("attention_dropout", lambda m: False, droppable=True, removable=True),
}
WIDE_VALUES = Ask("wide values", lambda m: m.capabilities.wide_values)
POOLED_QUERIES = Ask("pooled queries", takes_unequal)
POOLED_KEYS = Ask("pooled keys", takes_unequal)
SUBSAMPLED_QUERIES = Ask("subsampled queries", takes_unequal)
# The class token asks all tokens. One query is linear as it is, so a mechanism that needs as many keys as queries, or
# that knows places, of which the class token has none, leaves the layer alone.
ONE_QUERY = Ask("one query", asks_from_nowhere, keeps=True)
# A projection to another width, behind which nothing as wide as the queries can be added.
ANOTHER_WIDTH = Ask("another width", lambda m: type(m).after_projection is Mechanism.after_projection)


def changes_width(projection: Any) -> bool:
    """Whether a projection, linear or 1×1, puts out another number of channels than it takes."""
    weight = getattr(projection, "weight", None)
    return weight is not None and weight.ndim > 1 and weight.shape[0] != weight.shape[1]


BY_ORIGINAL: dict[type[nn.Module], type[Host]] = {}  # every host, by the module it stands for


class Host(nn.Module):
    """Base of the hosts, mixed into a timm attention class. Class methods take the module before it is a host."""

    original: ClassVar[type[nn.Module]]
    native: ClassVar[str] = "softmax"
    between: ClassVar[bool] = False  # the block around it calls the mechanism's step between attention and MLP
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # what may be dropped, and the attributes that hold it
    needs: ClassVar[tuple[Ask, ...]] = ()  # what a mechanism must honour
    mechanism: Mechanism
    grids: Grids | None = None
    given_up: tuple[str, ...] = ()  # what was dropped here, by all conversions so far

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What the timm class brings along."""

    def __init_subclass__(cls) -> None:
        if "original" in vars(cls):
            BY_ORIGINAL[cls.original] = cls

    @classmethod
    def shape(cls, module: Any) -> Shape:
        """Heads and widths, for building a mechanism: those of the packed projection, or else of the queries'."""
        packed = getattr(module, "qkv", None)
        alone = (getattr(module, name, None) for name in ("q", "wq", "q_proj"))
        first = packed if packed is not None else next(found for found in alone if found is not None)
        out, dim = first.weight.shape[:2]
        width = (out if packed is None else out // 3) // module.num_heads
        return Shape(module.num_heads, getattr(module, "head_dim", width), dim=dim)

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        """What the module does in this model beyond the plain mechanism, as far as it was not dropped before."""
        there = [feature for feature, held in cls.features.items() if not held or has(module, held[0])]
        if getattr(getattr(module, "attn_drop", None), "p", 0.0):
            there.append("attention_dropout")
        gone = getattr(module, "given_up", ())
        asks = [FEATURES[name] for name in there if not (FEATURES[name].removable and name in gone)]
        width = [ANOTHER_WIDTH] if changes_width(getattr(module, "proj", None)) else []
        return [*asks, *cls.needs, *width]

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        """Take a dropped feature out, with its parameters."""
        for name in cls.features.get(feature, ()):
            setattr(module, name, None)

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        """Options the module itself brings along for this mechanism, below what the plan says."""
        return {}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        """The key grid of a call with these arguments, for mechanisms whose parameters depend on it."""
        return None

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        """Once per model, after the swap: hooks for hosts that only see a sequence."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values by one packed projection."""
        return unpack(self.qkv(x), 3, self.num_heads)

    def split_heads(self, x: Tensor) -> Tensor:
        """`(batch, tokens, channels)` as `(batch, heads, tokens, head_dim)`."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

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

    def project_out(self, out: Tensor, q: Tensor) -> Tensor:
        """The heads joined and projected, and what the mechanism does behind that."""
        return self.mechanism.after_projection(self.proj(merge_heads(out)), q)


class SequenceHost(Host):
    """A host that only sees a sequence of tokens; hooks tell it which grid they lie on."""

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        follow_grids(model, cls)

    @property
    def token_grid(self) -> TokenGrid | None:
        return self.grids.grid if self.grids is not None else None


class PlainHost(SequenceHost):
    """The plain case: one projection in, one out, and a sequence between."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.proj_drop(self.project_out(self.attend(q, k, v, self.token_grid, x=x), q))


class PictureHost(Host):
    """A host that sees a picture `(batch, channels, height, width)`."""

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return grid_of(args[0])


class ChannelsLastHost(Host):
    """A host that sees a picture `(batch, height, width, channels)`."""

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(args[0].shape[1], args[0].shape[2])


class WindowHost(Host):
    """A host that sees the tokens of one window."""

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return replace(super().shape(module), grid=TokenGrid(*module.window_size))

    @property
    def window(self) -> TokenGrid:
        return TokenGrid(*self.window_size)


class OffsetBiasHost(Host):
    """LeViT's relative position, which others took over: a table of one value for each |Δrow|, |Δcolumn|."""

    features = {"relative_bias": ("attention_biases", "attention_bias_idxs")}

    def _init_buffers(self) -> None:
        if self.attention_biases is not None:
            super()._init_buffers()  # type: ignore[misc]

    def bias(self, keys: TokenGrid, stride: int = 1) -> Tensor | None:
        """The bias for a mechanism with logits, `(1, heads, queries, keys)`.

        Learned at `resolution`; on another grid the table is resized bilinearly, so that any input size works.
        """
        table, learned, size = self.attention_biases, to_2tuple(self.resolution), (keys.height, keys.width)
        if table is None or not has_logits(self.mechanism):
            return None
        if size != tuple(learned):
            table = F.interpolate(table[None].unflatten(-1, tuple(learned)), size, mode="bilinear")[0].flatten(-2)
        rows, columns = (torch.arange(side, device=table.device) for side in size)
        row = (rows[::stride, None] - rows[None, :]).abs()
        column = (columns[::stride, None] - columns[None, :]).abs()
        index = row[:, None, :, None] * keys.width + column[None, :, None, :]
        return table[:, index.flatten(2).flatten(0, 1)][None]

    def split_packed(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of heads that lie one behind the other."""
        return self.split_heads(packed).split([self.key_dim, self.key_dim, self.val_dim], dim=-1)


def has(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None


def given(model: nn.Module, module: nn.Module, part: str) -> bool:
    """Whether a model around this module has the named part, which it hands in with the call."""
    return any(
        has(owner, part) and any(inner is module for inner in owner.modules())
        for owner in model.modules()
        if owner is not module
    )


def unpack(packed: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """`(batch, tokens, parts · heads · head_dim)` as so many `(batch, heads, tokens, head_dim)`."""
    return packed.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def biased_projection(host: Any, x: Tensor) -> Tensor:
    """One packed projection with its bias in three parts, of which the keys' is a buffer of zeros."""
    bias = None if host.q_bias is None else torch.cat((host.q_bias, host.k_bias, host.v_bias))
    return F.linear(x, host.qkv.weight, bias)


def merge_heads(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def grid_of(picture: Tensor) -> TokenGrid:
    return TokenGrid(picture.shape[-2], picture.shape[-1])


def to_tokens(picture: Tensor) -> Tensor:
    """`(batch, channels, height, width)` as `(batch, tokens, channels)`."""
    return picture.flatten(2).transpose(1, 2)


def after_projection(mechanism: Mechanism, picture: Tensor, q: Tensor) -> Tensor:
    """The mechanism's last word on a projected output that is a picture."""
    return mechanism.after_projection(to_tokens(picture), q).transpose(1, 2).reshape(picture.shape)


def refuse_causal(is_causal: bool) -> None:
    if is_causal:
        raise LinvitError("a converted model cannot run causally: images have no order")
