"""What a host is: the block of a model that owns the projections around a mechanism.

A host is a subclass of the timm module it stands for. Converting changes the module's class in place and hangs the
mechanism in, so every weight, name and hook of the original stays where it was and an original checkpoint still loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.models.csatv2 import PosConv
from timm.models.gemma4_vit import Gemma4PatchEmbed
from timm.models.pit import Pooling
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from linvit.attention import Mechanism, Shape, TokenGrid
from linvit.errors import LinvitError


@dataclass(frozen=True)
class Ask:
    """Something the original attention does that not every mechanism can honour. `drop` names what may be given up.

    With `keeps`, a mechanism that cannot honour it leaves the layer as it is, which the report says.
    """

    feature: str
    honoured_by: Callable[[Mechanism], bool]
    droppable: bool = True
    keeps: bool = False


def bias_ask(feature: str) -> Ask:
    """A bias on the logits: exact in mechanisms that have logits."""
    return Ask(feature, lambda mechanism: mechanism.capabilities.bias)


def unequal_ask(feature: str, droppable: bool) -> Ask:
    """Queries and keys that differ in number."""
    return Ask(feature, lambda mechanism: mechanism.capabilities.unequal, droppable)


def rotary_ask() -> Ask:
    """Rotary position: it stays relative in mechanisms that know q and k by their products and norms."""
    return Ask("rotary", lambda mechanism: mechanism.capabilities.rotary)


def talking_ask() -> Ask:
    """Talking heads mix the logits and the weights of all heads, which only softmax has."""
    return Ask("talking_heads", lambda mechanism: mechanism.name == "softmax")


def wide_ask() -> Ask:
    """Values wider than keys."""
    return Ask("wide values", lambda mechanism: mechanism.capabilities.wide_values, droppable=False)


def width_ask(projection: Any) -> list[Ask]:
    """A projection, linear or 1×1, to another width, where nothing as wide as the queries can be added behind it."""
    out, queries = projection.weight.shape[:2]
    if out == queries:
        return []
    plain = Mechanism.after_projection
    return [Ask("another width", lambda mechanism: type(mechanism).after_projection is plain, droppable=False)]


def one_query_ask() -> Ask:
    """The class token asks all tokens. One query is linear as it is, so a mechanism that needs as many keys as queries,
    or that knows places, of which the class token has none, leaves the layer alone."""
    return Ask("one query", _asks_from_nowhere, droppable=False, keeps=True)


def _asks_from_nowhere(mechanism: Mechanism) -> bool:
    can = mechanism.capabilities
    return can.unequal and can.equivariant and not can.grid


def stem(owner: nn.Module) -> nn.Module | None:
    """The patch embedding of a model, whatever timm calls it."""
    names = ("patch_embed", "embeds", "pixel_embed", "stem_dct", "patch_embedding")
    inside = getattr(getattr(owner, "patch_embeddings", None), "projection", None)  # Hugging Face's
    found = (*(getattr(owner, name, None) for name in names), inside)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def prefix_tokens(owner: nn.Module) -> int:
    """How many class and register tokens a model has; Hugging Face's embeddings hold them without counting."""
    if not type(owner).__module__.startswith("transformers."):
        return getattr(owner, "num_prefix_tokens", getattr(owner, "num_tokens", 0))
    tokens = (getattr(owner, name, None) for name in ("cls_token", "distillation_token", "register_tokens"))
    classes = int(getattr(owner, "class_embedding", None) is not None)
    return classes + sum(token.shape[1] for token in tokens if isinstance(token, Tensor))


class Grids:
    """The grid of the image now passing through, for hosts that only see a sequence. Hooks on the stem write it."""

    def __init__(self, prefix: int = 0) -> None:
        self.prefix = prefix
        self.grid: TokenGrid | None = None
        self.owner: Any = None  # the model, while `convert` asks which grids its hosts see

    def follow(self, owner: nn.Module) -> list[RemovableHandle]:
        """Hook the stem of a model, and whatever else on the way changes the grid: PiT's pooling, CSATv2's stages."""
        embed = stem(owner)
        assert embed is not None
        self.prefix = prefix_tokens(owner)
        if hasattr(embed, "dynamic_feat_size") or isinstance(embed, Gemma4PatchEmbed):
            handles = [embed.register_forward_pre_hook(self.before_patches)]
        else:
            handles = [embed.register_forward_hook(self.after_stem)]
        for module in owner.modules():
            if isinstance(module, Pooling):
                handles.append(module.conv.register_forward_hook(self.after_stem))
            if isinstance(module, PosConv):
                handles.append(module.register_forward_pre_hook(self.before_position))
        return handles

    def before_patches(self, embed: Any, args: tuple[Any, ...]) -> None:
        """Forward pre-hook for timm's PatchEmbed and its likes. Ready-made patches (NaFlexViT) have no one grid."""
        self.grid = None
        if args[0].ndim == 4:
            height, width = args[0].shape[-2], args[0].shape[-1]
            if hasattr(embed, "dynamic_feat_size"):
                height, width = embed.dynamic_feat_size((height, width))
            else:
                height, width = height // embed.patch_size[0], width // embed.patch_size[1]
            self.grid = TokenGrid(height, width, self.prefix)

    def before_position(self, position: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook for a convolutional position encoding, called with the size of the picture."""
        self.grid = TokenGrid(args[1][0], args[1][1], self.prefix)

    def after_stem(self, stem: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """Forward hook for a stem with pictures as output, or with tokens and their size as XCiT's."""
        self.grid = None
        if isinstance(out, Tensor) and out.ndim == 4:
            self.grid = TokenGrid(out.shape[-2], out.shape[-1], self.prefix)
        elif isinstance(out, tuple) and isinstance(out[1], tuple):
            self.grid = TokenGrid(out[1][0], out[1][1], self.prefix)


class Host(nn.Module):
    """Base of the hosts, mixed into a timm attention class. Static methods take the module before it is a host."""

    original: ClassVar[type[nn.Module]]
    native: ClassVar[str] = "softmax"
    between: ClassVar[bool] = False  # the block around it calls the mechanism's step between attention and MLP
    mechanism: Mechanism
    grids: Grids | None = None
    given_up: tuple[str, ...] = ()  # what was dropped here, by all conversions so far

    @staticmethod
    def shape(module: Any) -> Shape:
        """Heads and widths, for building a mechanism; those of one packed projection unless a host says otherwise."""
        width = module.qkv.in_features
        return Shape(module.num_heads, width // module.num_heads, dim=width)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        """What the module does beyond the plain mechanism."""
        return dropout_ask(module)

    @classmethod
    def asks_in(cls, model: nn.Module, module: Any) -> list[Ask]:
        """`asks`, where the model around the module decides: a bias or a rotation that it hands in with the call."""
        return cls.asks(module)

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


def follow_grids(model: nn.Module, kind: type[Host]) -> None:
    """Give hosts that only see a sequence the grid of the image now passing through."""
    for owner in model.modules():
        if stem(owner) is None:
            continue
        hosts = [module for module in owner.modules() if isinstance(module, Host)]
        new = [host for host in hosts if isinstance(host, kind) and host.grids is None]
        if not new:
            continue
        grids = next((host.grids for host in hosts if host.grids is not None), None)
        if grids is None:
            grids = Grids()
            grids.follow(owner)
        for host in new:
            host.grids = grids


def given(model: nn.Module, module: nn.Module, part: str) -> bool:
    """Whether a model around this module has the named part, which it hands in with the call."""
    return any(
        getattr(owner, part, None) is not None and any(inner is module for inner in owner.modules())
        for owner in model.modules()
        if owner is not module
    )


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
