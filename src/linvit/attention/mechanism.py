"""The contract of a mechanism: how tokens talk, `(q, k, v) -> out`.

A mechanism is an `nn.Module`. The base class checks the arguments, lifts half precision to float32, keeps autocast
outside, and leaves three things to a subclass: `implied_map` (an N×N matrix), `core` (which multiplies v with it, most
often in a better order) and `macs`. `finish` adds an output norm, a gate or a local branch.
"""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linvit.attention.precision import lift, lower, outside_autocast
from linvit.attention.rotary import Rotary
from linvit.attention.shapes import Shape, Size, TokenGrid
from linvit.errors import LinvitError, unknown

ROTARY = {
    "products": "turns q and k, and knows them by their products and norms: position stays relative",
    "features": "turns their features, not their normaliser: position stays relative",
    "before": "turns q and k before a feature map, which sees positions, but not as relative ones",
}


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do. The registry-wide tests check every field, also that what is denied is refused."""

    linear: bool = True  # time and memory grow linearly with the tokens
    normalised: bool = True  # the output keeps the scale of v however many tokens there are
    any_tokens: bool = True  # serves any number of tokens, not only the one it was built for
    unequal: bool = True  # queries and keys may differ in number (pooled keys, subsampled queries)
    wide_values: bool = True  # v may have another width than k
    key_mask: bool = True  # a boolean key mask drops padded tokens
    prefix: bool = True  # class and register tokens may come first
    bias: bool = False  # an additive bias on the logits (relative position, shift mask)
    rotary: str = ""  # one of ROTARY: how rotary position is taken; without, it is refused
    grid: bool = False  # needs to know the token grid
    input: bool = False  # needs the block's input `x` beside q, k and v
    map: bool = True  # has an implied N×N map
    equivariant: bool = True  # permuting the tokens permutes the output
    value: bool = True  # reads v at all
    between: bool = False  # adds a block-level step between attention and MLP
    dynamic: bool = True  # an exported program of it serves other sizes than the one it was traced at

    def __post_init__(self) -> None:
        if self.rotary and self.rotary not in ROTARY:
            raise unknown("way of rotary position", str(self.rotary), ROTARY)


@dataclass(frozen=True)
class Call:
    """What comes along with q, k and v in one call."""

    grid: TokenGrid
    key_grid: TokenGrid
    mask: Tensor | None = None  # (batch, keys), true for the keys that take part
    bias: Tensor | None = None  # see `Mechanism.forward`
    x: Tensor | None = None
    rotary: Rotary | None = None
    kernels: bool = False  # fused kernels may be used: impl is not "reference"
    filtered: bool = False  # the output has its local branch already

    def keep(self, per_key: Tensor, fill: float = 0.0) -> Tensor:
        """`per_key`, `(batch, heads, keys, …)`, with the masked keys filled."""
        if self.mask is None:
            return per_key
        mask = self.mask[:, None, :, None]
        return torch.where(mask, per_key, torch.full((), fill, dtype=per_key.dtype, device=per_key.device))

    def turn(self, phi: Tensor) -> Tensor:
        """Features with their rotary position, if there is any."""
        return phi if self.rotary is None else self.rotary.features(phi)

    def with_some_key(self) -> "tuple[Call, Tensor | None]":
        """The call with all keys where a mask leaves an image none, and which images these are, `(batch, 1, 1, 1)`:
        their output is zero, as in PyTorch's attention, and nothing divides by zero keys."""
        if self.mask is None:
            return self, None
        nothing = ~self.mask.any(-1, keepdim=True)
        return replace(self, mask=self.mask | nothing), nothing[:, :, None, None]

    @property
    def keys(self) -> int | Tensor:
        """How many keys take part: a number, or `(batch, 1, 1, 1)` under a mask."""
        return self.key_grid.tokens if self.mask is None else self.mask.sum(-1)[:, None, None, None]

    @property
    def one_grid(self) -> bool:
        """Whether queries and keys lie on the same grid. A compiler cannot compare grids whose size it does not know,
        and most often they are the same object."""
        return self.grid is self.key_grid or self.grid == self.key_grid

    @property
    def query_mask(self) -> Tensor | None:
        """The mask as the queries' too, for sums over queries: on one grid a padded key is a padded query."""
        return self.mask if self.one_grid else None

    def mean_query(self, per_query: Tensor) -> Tensor:
        """The mean of `(batch, heads, queries, …)` over the queries that are not padding, their axis kept."""
        if self.query_mask is None:
            return per_query.mean(-2, keepdim=True)
        return self.keep(per_query).sum(-2, keepdim=True) / self.keys

    def mean(self, per_query: Tensor) -> Tensor:
        """The mean of `(batch, queries, channels)` over the queries that are not padding."""
        if self.query_mask is None:
            return per_query.mean(1)
        kept = per_query.masked_fill(~self.query_mask[:, :, None], 0.0)
        return kept.sum(1) / self.query_mask.sum(1, keepdim=True)


NO_KERNEL = "it has no Triton kernel; use impl='auto' or 'reference'"


class Mechanism(nn.Module):
    """Base of every mechanism; see the module's docstring. `name` and `paper` are set by `register`."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    variants: ClassVar[tuple[str, ...]] = ()  # the first is the default
    needs: ClassVar[tuple[str, ...]] = ()  # fields of Shape that must be given
    builds_on_grid: ClassVar[bool] = False  # has parameters laid out for the grid it is built for
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)  # option sets the registry-wide tests run over
    shared: ClassVar[dict[str, Any]] = {}  # options of a whole family, with their defaults, for `share`
    capabilities: Capabilities = Capabilities()
    triton: bool = False  # `fused` may run a Triton kernel, and is then tried for impl="triton" too

    def __init__(self, shape: Shape, *, variant: str | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.built_for: set[str] = set()
        self.require(*self.needs)
        if variant not in (None, *self.variants):
            raise unknown(f"variant of {self.name}", str(variant), self.variants)
        self.variant = variant or (self.variants[0] if self.variants else "")
        self.impl = "auto"
        self.options: dict[str, Any] = {}  # what create_attention was given beside the shape

    def require(self, *needed: str) -> None:
        """Insist on fields of the shape; calls are then checked against them. For options that bring parameters."""
        missing = [field for field in needed if getattr(self.shape, field) is None]
        if missing:
            raise LinvitError(f"{self.name} has parameters: give {', '.join(f'{m}=' for m in missing)}")
        self.built_for.update(needed)

    def share(self, **options: Any) -> None:
        """Take the options of the family, after building."""

    def enter(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Call]:
        """What happens to q and k before anything else: rotary position turns them, unless it is to turn features."""
        if call.rotary is None or self.capabilities.rotary == "features":
            return q, k, call
        return call.rotary(q), call.rotary(k), replace(call, rotary=None)

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The plain PyTorch reference of the part that is linear in v, in float32 or float64."""
        return self.implied_map(q, k, call) @ v

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Output norm, gate and local branch, if any."""
        return out

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """`(batch, heads', queries, keys)`: what core multiplies v with, channels regrouped into heads'."""
        raise LinvitError(f"{self.name} mixes channels, not tokens: it has no map")

    def macs(self, size: Size) -> int:
        """Exact multiply-accumulates of one call of the reference, local branch included; here q · kᵀ and map · v."""
        return size.batch * size.heads * size.queries * size.keys * (size.head_dim + size.value_dim)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        """A faster way to the same output, or why there is none. Not tried when impl is 'reference'."""
        return NO_KERNEL

    def after_projection(self, out: Tensor, q: Tensor) -> Tensor:
        """Hosts call this on the projected output `(batch, tokens, channels)`."""
        return out

    @property
    def adds_behind(self) -> bool:
        """Whether `after_projection` does anything."""
        return type(self).after_projection is not Mechanism.after_projection

    def between(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """Blocks call this on the residual stream between attention and MLP when `capabilities.between`."""
        return x

    def between_macs(self, size: Size) -> int:
        """Exact multiply-accumulates of `between`."""
        return 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid | None = None, *, key_grid: TokenGrid | None = None,
        mask: Tensor | None = None, bias: Tensor | None = None, x: Tensor | None = None, rotary: Rotary | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend: q, k, v are `(batch, heads, tokens, head_dim)` in any strides, the output like v at q's tokens.

        `mask`, boolean `(batch, keys)`, is true for the keys that take part. `bias` is added to the logits: what
        `(batch, heads, queries, keys)` can be made of by repeating, be it a few images that come again and again, as
        windows of shifted images do. `rotary` turns q and k, or their features.
        """
        call = self._check(q, k, v, grid, key_grid, mask, bias, x, rotary)
        k, v = call.keep(k), call.keep(v)  # a weight of zero times NaN is NaN
        call, nothing = call.with_some_key()
        with outside_autocast(q.device):
            out = lower(self._attend(q, k, v, call), v.dtype)
        return out if nothing is None else out.masked_fill(nothing, 0.0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k, call = self.enter(q, k, call)
        if self.impl != "reference":
            call = replace(call, kernels=True)
            out = self.fused(q, k, v, call) if self.triton or self.impl == "auto" else NO_KERNEL
            if not isinstance(out, str):
                return out
            if self.impl == "triton":
                raise LinvitError(f"{self.name} cannot run on the Triton kernel: {out}")
            if not torch.compiler.is_compiling():
                log_reference(self.name, out)
        lifted = lift(q), lift(k), lift(v)
        return self.finish(self.core(*lifted, call), *lifted, call)

    @torch.no_grad()
    def why_reference(self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid | None = None, **given: Any) -> str | None:
        """Why impl="auto" takes the plain reference for such a call, or None where there is something faster.

        It takes what a call takes, and finds out by trying. The first call for each reason also logs it, at level debug
        of the logger "linvit".
        """
        call = self._check(q, k, v, grid, **given)
        with outside_autocast(q.device):
            q, k, call = self.enter(q, k, call)
            out = self.fused(q, k, v, call)
        return out if isinstance(out, str) else None

    def map(self, q: Tensor, k: Tensor, grid: TokenGrid | None = None, **given: Any) -> Tensor:
        """The implied map of the linear core, before any output norm and local branch: for pictures and tests.

        It takes `key_grid`, `mask`, `bias` and `rotary` as a call does.
        """
        q, k, call, nothing = self.entered(q, k, grid, **given)
        with outside_autocast(q.device):
            found = self.implied_map(q, k, call)
        return found if nothing is None else found.masked_fill(nothing, 0.0)

    def entered(
        self, q: Tensor, k: Tensor, grid: TokenGrid | None = None, **given: Any
    ) -> tuple[Tensor, Tensor, Call, Tensor | None]:
        """q, k and the call as `core` and `implied_map` take them, and which images a mask leaves no key."""
        call = self._check(q, k, None, grid, **given)
        k = call.keep(k)
        call, nothing = call.with_some_key()
        with outside_autocast(q.device):
            q, k, call = self.enter(q, k, call)
        return lift(q), lift(k), call, nothing

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor | None, grid: TokenGrid | None, key_grid: TokenGrid | None = None,
        mask: Tensor | None = None, bias: Tensor | None = None, x: Tensor | None = None, rotary: Rotary | None = None,
    ) -> Call:  # fmt: skip
        can = self.capabilities
        for_map, v = v is None, k if v is None else v
        for letter, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.ndim != 4:
                raise LinvitError(f"{letter} must be (batch, heads, tokens, head_dim), got shape {tuple(tensor.shape)}")
        if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            shapes = ", ".join(f"{letter} {tuple(t.shape)}" for letter, t in (("q", q), ("k", k), ("v", v)))
            raise LinvitError(f"q, k and v do not fit together: {shapes}")
        queries, keys = q.shape[2], k.shape[2]
        if grid is None:
            if can.grid:
                raise LinvitError(f"{self.name} looks at the token grid: give grid=TokenGrid(height, width, prefix)")
            grid = TokenGrid.line(queries)
        if grid.tokens != queries:
            raise LinvitError(f"the grid {grid} has {grid.tokens} tokens but q has {queries}")
        if key_grid is None:
            if keys == queries:
                key_grid = grid
            elif can.grid and can.unequal:
                raise LinvitError(f"{keys} keys for {queries} queries: {self.name} needs key_grid=TokenGrid(…) as well")
            else:
                key_grid = TokenGrid.line(keys)
        if key_grid.tokens != keys:
            raise LinvitError(f"the key grid {key_grid} has {key_grid.tokens} tokens but k has {keys}")
        if keys != queries and not can.unequal:
            raise LinvitError(f"{self.name} needs as many keys as queries, got {keys} and {queries}")
        if v.shape[3] != k.shape[3] and not can.wide_values:
            raise LinvitError(f"{self.name} needs v as wide as k, got {v.shape[3]} and {k.shape[3]}")
        if grid.prefix and not can.prefix:
            raise LinvitError(f"{self.name} has no place for prefix tokens, the grid has {grid.prefix}")
        for field, given in (("heads", q.shape[1]), ("head_dim", q.shape[3])):
            if field in self.built_for and getattr(self.shape, field) != given:
                raise LinvitError(f"{self.name} was built for {field}={getattr(self.shape, field)}, got {given}")
        fixed = None if can.any_tokens or self.shape.grid is None else self.shape.grid.tokens
        if fixed is not None and keys != fixed:
            raise LinvitError(f"{self.name} is fixed to the {fixed} tokens it was built for, got {keys}: build another")
        if mask is not None:
            if not can.key_mask:
                raise LinvitError(f"{self.name} cannot honour a key mask")
            if mask.dtype != torch.bool or mask.shape != (q.shape[0], keys):
                wanted = f"boolean (batch, keys) = ({q.shape[0]}, {keys}), true for keys to use"
                raise LinvitError(f"the key mask must be {wanted}; got {mask.dtype} {tuple(mask.shape)}")
        if bias is not None:
            if not can.bias:
                raise LinvitError(f"{self.name} cannot honour a bias on the logits")
            bias = bias[(None,) * (4 - bias.ndim)]
            whole = (q.shape[0], q.shape[1], queries, keys)
            fits = bias.ndim == 4 and q.shape[0] % max(1, bias.shape[0]) == 0
            if not fits or any(size not in (1, full) for size, full in zip(bias.shape[1:], whole[1:], strict=True)):
                raise LinvitError(f"a bias of {tuple(bias.shape)} does not fit logits of {whole}")
        if can.input and x is None and not for_map:
            raise LinvitError(f"{self.name} reads the block's input: give x=(batch, tokens, channels)")
        if rotary is not None:
            if not can.rotary:
                raise LinvitError(f"{self.name} cannot honour rotary position: it does not stay relative there")
            rotary.check(q, k)
        return Call(grid, key_grid, mask, bias, x, rotary)


@lru_cache(maxsize=1024)
def log_reference(name: str, why: str) -> None:
    """Once for each reason."""
    logging.getLogger("linvit").debug("%s takes the reference: %s", name, why)
