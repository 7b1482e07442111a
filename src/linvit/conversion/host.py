"""What a host is: the block of a model that owns the projections around a mechanism.

A host is a subclass of the timm module it stands for. Converting changes the module's class in place and hangs the
mechanism in, so every weight, name and hook of the original stays where it was and an original checkpoint still loads.
The files in `hosts/` have what is a module's own: the rest is here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Mechanism, Rotary, Shape, TokenGrid
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


# What `drop` may name, whatever the model. Mechanisms in which rotary position cannot stay relative see q and k rotated
# all the same.
FEATURES: dict[str, Ask] = {
    "relative_bias": Ask("relative_bias", has_logits, droppable=True, removable=True),
    "shift_mask": Ask("shift_mask", has_logits, droppable=True, removable=True),
    "talking_heads": Ask("talking_heads", lambda m: m.name == "softmax", droppable=True, removable=True),
    "pooling": Ask("pooling", takes_unequal, droppable=True, removable=True),
    "rotary": Ask("rotary", lambda m: m.capabilities.rotary in ("products", "features"), droppable=True),
    "temperature": Ask(
        "temperature", lambda m: m.name == "xca" and m.variant == "fair", droppable=True, removable=True
    ),
    "attention_dropout": Ask("attention_dropout", lambda m: False, droppable=True, removable=True),
}
WIDE_VALUES = Ask("wide values", lambda m: m.capabilities.wide_values)
POOLED_QUERIES = Ask("pooled queries", takes_unequal)
POOLED_KEYS = Ask("pooled keys", takes_unequal)
# Fewer queries than keys, and no block's input as long as they are.
SUBSAMPLED_QUERIES = Ask("subsampled queries", lambda m: takes_unequal(m) and not m.capabilities.input)
# The class token asks all tokens. One query is linear as it is, so a mechanism that needs as many keys as queries, or
# that knows places, of which the class token has none, leaves the layer alone.
ONE_QUERY = Ask("one query", asks_from_nowhere, keeps=True)
# A projection of the output that lies outside, or to which nothing is added here.
CLOSED = Ask("an output projection that nothing is added behind", lambda m: not m.adds_behind)
# A projection to another width, behind which nothing as wide as the queries can be added.
ANOTHER_WIDTH = Ask("another width", lambda m: not m.adds_behind)


def changes_width(projection: Any) -> bool:
    """Whether a projection, linear or 1×1, puts out another number of channels than it takes."""
    weight = getattr(projection, "weight", None)
    return weight is not None and weight.ndim > 1 and weight.shape[0] != weight.shape[1]


HEADS = ("num_heads", "num_attention_heads", "heads")  # what modules call their number
PROJECTIONS = ("qkv", "q", "wq", "q_proj", "query", "v", "in_proj", "pwise")  # one of which reads a block's input
BY_ORIGINAL: "dict[type[nn.Module], type[Host]]" = {}  # every host, by the module it stands for


class Host(nn.Module):
    """Base of the hosts, mixed into the attention class they stand for, which is the last of their bases. Class methods
    take the module before it is a host."""

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
        last: Any = cls.__bases__[-1]
        if not issubclass(last, Host):
            cls.original = last
            BY_ORIGINAL[last] = cls

    @classmethod
    def shape(cls, module: Any) -> Shape:
        """Heads and widths, for building a mechanism: those of the packed projection, or else of the queries'."""
        heads = next(getattr(module, name) for name in HEADS if has(module, name))
        name = next(name for name in PROJECTIONS if has(module, name))
        projection = getattr(module, name)
        out, dim = getattr(projection, "linear", projection).weight.shape[:2]
        width = (out // 3 if name == "qkv" else out) // heads
        return Shape(heads, getattr(module, "head_dim", width), dim=dim)

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        """What the module does in this model beyond the plain mechanism, as far as it was not dropped before."""
        there = [feature for feature, held in cls.features.items() if not held or has(module, held[0])]
        if getattr(getattr(module, "attn_drop", None), "p", 0.0):
            there.append("attention_dropout")
        gone = getattr(module, "given_up", ())
        asks = [FEATURES[name] for name in there if not (FEATURES[name].removable and name in gone)]
        shape = cls.shape(module)
        wide = [WIDE_VALUES] if shape.values != shape.head_dim else []
        width = [ANOTHER_WIDTH] if changes_width(getattr(module, "proj", None)) else []
        return [*asks, *wide, *cls.needs, *width]

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        """Take a dropped feature out, with its parameters, where it can be."""
        for name in cls.features.get(feature, ()) if FEATURES[feature].removable else ():
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

    def packed(self, x: Tensor) -> Tensor:
        """One projection for all three. Some have its bias in three parts, of which the keys' is a buffer of zeros."""
        if not has(self, "q_bias"):
            return self.qkv(x)
        return F.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values."""
        return unpack(self.packed(x), 3, self.num_heads)

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
        rotary: Rotary | None = None,
    ) -> Tensor:
        """Call the mechanism with what it takes. A sequence that left the grid (dropped patches) comes without one; a
        mechanism that takes no rotary position gets q and k rotated."""
        if rotary is not None and not self.mechanism.capabilities.rotary:
            q, k, rotary = rotary(q), rotary(k), None
        if grid is not None and grid.tokens != q.shape[2]:
            grid = None
        x = x if self.mechanism.capabilities.input else None
        return self.mechanism(q, k, v, grid, key_grid=key_grid, mask=mask, bias=bias, x=x, rotary=rotary)

    def project_out(self, out: Tensor, q: Tensor) -> Tensor:
        """The heads joined and projected."""
        return self.finish(self.proj(merge_heads(out)), q)

    def finish(self, out: Tensor, q: Tensor) -> Tensor:
        """What the mechanism does behind the projection, to tokens or a picture, and the dropout where there is one."""
        if out.ndim == 4:
            out = self.mechanism.after_projection(to_tokens(out), q).transpose(1, 2).reshape(out.shape)
        else:
            out = self.mechanism.after_projection(out, q)
        return self.proj_drop(out) if has(self, "proj_drop") else out


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


def merge_heads(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def grid_of(picture: Tensor, stride: int = 1) -> TokenGrid:
    """The grid of a picture `(batch, channels, height, width)`, or of every so many of its places."""
    return TokenGrid(-(-picture.shape[-2] // stride), -(-picture.shape[-1] // stride))


def to_tokens(picture: Tensor) -> Tensor:
    """`(batch, channels, height, width)` as `(batch, tokens, channels)`."""
    return picture.flatten(2).transpose(1, 2)


def refuse_causal(is_causal: bool) -> None:
    if is_causal:
        raise LinvitError("a converted model cannot run causally: images have no order")
