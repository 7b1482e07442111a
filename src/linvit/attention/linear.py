"""The base of most mechanisms: `out = local(v) + norm(phi(q) · (phi(k)ᵀ · v))`.

A subclass names its feature map and its normaliser; `LinearAttention` derives the reference, the implied map, the MAC
count and the use of the fused kernel from them. A feature map that the kernel has runs inside it; any other runs in
PyTorch and its features go through the kernel as they are.

Rotary position turns the features, in the numerator only: see `Rotary`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.local import Filter
from linvit.attention.mechanism import Call, Capabilities, Mechanism, Shape, Size, TokenGrid, lift
from linvit.attention.precision import lower
from linvit.attention.rotary import Rotary
from linvit.kernels import linear as kernel
from linvit.kernels import local
from linvit.kernels.fused import Given, plain, signature_of, unserved
from linvit.kernels.linear import Formula


@dataclass(frozen=True)
class Feature:
    """A feature map phi without parameters, along head_dim. `width` is its output size for a given head_dim."""

    kernel: ClassVar[str | None] = None  # what the fused kernel calls it, where it has it
    eps: ClassVar[float] = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def width(self, head_dim: int) -> int:
        return head_dim


class ReLU(Feature):
    """max(x, 0)"""

    kernel = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class EluPlusOne(Feature):
    """elu(x) + 1"""

    kernel = "elu_plus_one"

    def __call__(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


class Sigmoid(Feature):
    """1 / (1 + exp(−x))"""

    kernel = "sigmoid"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


@dataclass(frozen=True)
class Direction(Feature):
    """x / ‖x‖₂"""

    kernel = "direction"
    eps: float = 1e-6  # type: ignore[misc]

    def __call__(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.eps)


@dataclass(frozen=True)
class Normaliser:
    """The factor that each query's output is multiplied with, `(batch, heads, queries, 1)` or what broadcasts to it."""

    def __call__(self, phi_q: Tensor, phi_k: Tensor, head_dim: int, call: Call) -> Tensor | float:
        raise NotImplementedError

    def kernel(self, keys: int, head_dim: int) -> dict[str, Any] | None:
        """The same in the words of the fused kernel's formula, for `keys` keys; None where it has none."""
        return None

    def under_mask(self, call: Call, head_dim: int) -> Tensor | float:
        """What the kernel's output is still to be multiplied with because a mask leaves fewer keys."""
        return 1.0

    def macs_per_query(self, width: int) -> int:
        """Multiply-accumulates for one query of one head, `width` features wide."""
        return 0


@dataclass(frozen=True)
class RowSum(Normaliser):
    """1 / (phi(q) · Σ phi(k) + eps): every row of the implied map sums to one. A row without a match goes to zero."""

    eps: float = 1e-6
    clamp: bool = False  # the sum is at least eps, to which nothing is added: rows sum to exactly one
    per_key: bool = False  # eps stands beside the mean over keys, not beside their sum

    def __call__(self, phi_q: Tensor, phi_k: Tensor, head_dim: int, call: Call) -> Tensor:
        total, eps = phi_q @ phi_k.sum(-2).unsqueeze(-1), self.eps * call.keys if self.per_key else self.eps
        return 1 / (total.clamp_min(eps) if self.clamp else total + eps)

    def kernel(self, keys: int, head_dim: int) -> dict[str, Any] | None:
        eps = self.eps * keys if self.per_key else self.eps  # masked keys count too, a part in a million
        return {"row_sum": True, "clamp": self.clamp, "eps": eps}

    def macs_per_query(self, width: int) -> int:
        return width


@dataclass(frozen=True)
class Constant(Normaliser):
    """A constant of the number of keys and the head_dim: nothing to divide by, nothing to blow up."""

    factor: Callable[[int | Tensor, int], Tensor | float]

    def __call__(self, phi_q: Tensor, phi_k: Tensor, head_dim: int, call: Call) -> Tensor | float:
        return self.factor(call.keys, head_dim)

    def kernel(self, keys: int, head_dim: int) -> dict[str, Any] | None:
        return {"scale": float(self.factor(keys, head_dim))}

    def under_mask(self, call: Call, head_dim: int) -> Tensor | float:
        return self.factor(call.keys, head_dim) / self.factor(call.key_grid.tokens, head_dim)


@dataclass(frozen=True)
class Unnormalised(Constant):
    """One: nothing is divided by."""

    factor: Callable[[int | Tensor, int], Tensor | float] = lambda keys, head_dim: 1.0


@dataclass(frozen=True)
class Fusion:
    """A call as the kernel takes it: with what q and k it computes which formula."""

    q: Tensor
    k: Tensor
    formula: Formula
    constant: Tensor | None = None  # added to every product of a query and a key


TURNED = "the kernel turns neighbouring channels, or halves of a power of two, of features as wide as the head"
MOST_KNOWN = 256  # signatures that a mechanism keeps; a service may see any number of them
Ready = tuple[tuple[Tensor, Tensor, Tensor], Formula, tuple[Tensor | None, Tensor | None]]  # q, k, v; cosines, sines
UNKNOWN: tuple[str, TokenGrid | None, Any] = ("", None, None)


class LinearAttention(Mechanism):
    """Linear attention by a feature map and a normaliser; override `features` for maps with parameters."""

    capabilities = Capabilities(rotary="features")
    feature: Feature = Feature()
    normaliser: Normaliser
    triton = True
    shared = {"rotary": "after", "centre": False}
    centre = False

    def __init__(self, shape: Shape, *, variant: str | None = None) -> None:
        super().__init__(shape, variant=variant)
        self.known: dict[tuple[Any, ...], tuple[str, TokenGrid, Formula]] = {}  # by signature, calls for the short way

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid | None = None, *, key_grid: TokenGrid | None = None,
        mask: Tensor | None = None, bias: Tensor | None = None, x: Tensor | None = None, rotary: Rotary | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend; by the short way where a call like this one was checked and is nothing but the kernel's formula.

        The checks take the host longer than the launch, and at small sizes the host is what one waits for.
        """
        if key_grid is None and mask is None and bias is None and rotary is None and plain(q) and self.known:
            signature = signature_of(q, k, v)
            impl, known, formula = self.known.get(signature, UNKNOWN)
            if impl == self.impl and (grid is known or grid is None or grid == known):
                return lower(kernel.op(q, k, v, self.beside(v), formula, signature), v.dtype)
        return super().forward(q, k, v, grid, key_grid=key_grid, mask=mask, bias=bias, x=x, rotary=rotary)

    def share(self, *, rotary: Literal["after", "before"] = "after", centre: bool = False, **options: Any) -> None:
        """`rotary` says whether rotary position turns features, or q and k before the feature map; `centre` takes from
        each key the mean of all keys, which softmax would not see and a feature map does."""
        if rotary == "before" and self.capabilities.rotary != "products":
            self.capabilities = replace(self.capabilities, rotary="before")
        self.centre = centre

    def enter(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Call]:
        if self.centre:
            k = call.keep(lift(k) - call.keep(lift(k)).sum(-2, keepdim=True) / call.keys).to(k.dtype)
        return super().enter(q, k, call)

    def learn(self, q: Tensor, k: Tensor, v: Tensor, call: Call, fusion: Fusion) -> None:
        """Let calls like this one take the short way, if the kernel takes q and k as they are and does all there is to
        do, by a formula that shapes and options alone decide."""
        can = self.capabilities
        if can.grid or can.input or self.centre or call.mask is not None or not plain(q) or not self.does_all():
            return
        if call.rotary is not None or not call.one_grid:
            return
        if fusion.q is q and fusion.k is k and fusion.constant is self.constant:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known[signature_of(q, k, v)] = (self.impl, call.grid, fusion.formula)

    def does_all(self) -> bool:
        """Whether nothing is left to do after the kernel, in training or not."""
        steps = (type(self).finish, type(self).finish_fused)
        return steps == (Mechanism.finish, LinearAttention.finish_fused)

    @property
    def constant(self) -> Tensor | None:
        """The tensor that the formula's constant is made of, where it is a parameter."""
        return None

    @property
    def near(self) -> Filter | None:
        """The local branch that follows the formula, which the kernel adds as well."""
        return None

    def add_near(self, out: Tensor, v: Tensor, call: Call) -> Tensor:
        """The output with its local branch, unless the kernel has added that."""
        return out if self.near is None or call.filtered else self.near.add(out, v, call)

    def beside(self, v: Tensor) -> Given:
        """The tensors beside q, k and v of a call that takes the short way."""
        if self.near is None:
            return (None, None, None, self.constant, None, None)
        return (None, None, None, self.constant, *self.near.filters(v.shape[1], v.shape[3]))

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """phi(q) and phi(k); masked keys are zeroed afterwards."""
        return self.feature(q), self.feature(k)

    def width(self, head_dim: int) -> int:
        """How many features a head has."""
        return self.feature.width(head_dim)

    def feature_macs(self, size: Size) -> int:
        """Multiply-accumulates of the feature map itself."""
        return 0

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        phi_q, phi_k = self.features(q, k, call)
        phi_k = call.keep(phi_k)
        factor = self.normaliser(phi_q, phi_k, q.shape[-1], call)
        state = call.turn(phi_k).transpose(-2, -1) @ v
        if isinstance(factor, float):  # the state is smaller than the output
            return call.turn(phi_q) @ (state * factor)
        return call.turn(phi_q) @ state * factor

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        phi_q, phi_k = self.features(q, k, call)
        phi_k = call.keep(phi_k)
        factor = self.normaliser(phi_q, phi_k, q.shape[-1], call)
        return call.turn(phi_q) @ call.turn(phi_k).transpose(-2, -1) * factor

    def macs(self, size: Size) -> int:
        width = self.width(size.head_dim)
        products = (size.keys + size.queries) * width * size.value_dim
        norm = size.queries * self.normaliser.macs_per_query(width)
        return size.batch * size.heads * (products + norm) + self.feature_macs(size)

    def fusion(self, q: Tensor, k: Tensor, call: Call) -> Fusion | str:
        """The call as the kernel takes it, or why it cannot."""
        norm = self.normaliser.kernel(k.shape[2], q.shape[-1])
        if norm is None or type(self).core is not LinearAttention.core:
            return "it computes more than the kernel's formula"
        if type(self).features is LinearAttention.features and self.feature.kernel is not None:
            return Fusion(q, k, Formula(self.feature.kernel, feature_eps=self.feature.eps, **norm))
        if self.width(q.shape[-1]) > kernel.WIDEST[q.dtype.itemsize]:
            return f"its {self.width(q.shape[-1])} features per head are too many"
        phi_q, phi_k = self.features(lift(q), lift(k), call)
        return Fusion(phi_q, phi_k, Formula("identity", **norm))

    def finish_fused(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """`finish`, less what of it the kernel did."""
        return self.finish(out, q, k, v, call)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        fusion = unserved(q, k, v) or self.fusion(q, k, call)
        out = fusion if isinstance(fusion, str) else self.by_kernel(q, k, v, call, fusion)
        mapped = self.by_map(q, k, v, call) if isinstance(out, str) and self.impl != "triton" else None
        return out if mapped is None else mapped

    def for_kernel(self, v: Tensor, call: Call, fusion: Fusion) -> Ready | str:
        """q, k and v in the type that the kernel takes them in, the formula and the angles; or why it cannot."""
        # Features computed outside come in float32, and float16 has too small a range for them.
        dtype = torch.float32 if fusion.q.dtype != v.dtype and v.dtype == torch.float16 else v.dtype
        q, k, v = (t.to(dtype) for t in (fusion.q, fusion.k, v))
        formula = fusion.formula
        turn: tuple[Tensor | None, Tensor | None] = (None, None)
        if call.rotary is not None:
            cos, sin = call.rotary.cos, call.rotary.sin
            formula, turn = formula._replace(turn=call.rotary.turn), (cos, sin.expand_as(cos))
            if call.rotary.head_dim != q.shape[3] or not formula.turn:
                return TURNED
        why = kernel.why_not(q, k, v, formula) or kernel.why_not_turned(*turn, formula)
        return ((q, k, v), formula, turn) if why is None else why

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call, fusion: Fusion) -> Tensor | str:
        ready = self.for_kernel(v, call, fusion)
        if isinstance(ready, str):
            return ready
        (q_, k_, v_), formula, turn = ready
        filters: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.near is not None and v_.dtype == v.dtype and call.mask is None and call.one_grid:
            filters = self.near.filters(v.shape[1], v.shape[3])
            if local.why_not(v, filters[0]) is None:
                call, (height, width, prefix) = replace(call, filtered=True), self.near.over(call.grid)
                formula = formula._replace(height=height, width=width, prefix=prefix)
            else:
                filters = (None, None)
        if call.filtered or self.near is None:
            self.learn(q, k, v, call, replace(fusion, formula=formula))
        out = kernel.op(q_, k_, v_, (call.mask, *turn, fusion.constant, *filters), formula)
        if call.mask is not None:
            out = out * self.normaliser.under_mask(call, q.shape[-1])
        return self.finish_fused(out.to(v.dtype), q, k, v, call).to(v.dtype)

    def by_map(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        """The products in the other order, where that is cheaper: with few tokens the N×N map is small."""
        queries, keys, width, values = q.shape[2], k.shape[2], self.width(q.shape[-1]), v.shape[-1]
        cheaper = queries * keys * (width + values) < (queries + keys) * width * values
        if not cheaper or type(self).core is not LinearAttention.core:
            return None
        dtype = v.dtype
        q, k, v = lift(q), lift(k), lift(v)
        return self.finish(self.implied_map(q, k, call) @ v, q, k, v, call).to(dtype)


def regroup(x: Tensor, heads: int) -> Tensor:
    """The same channels in another number of heads: `(batch, h, tokens, d)` to `(batch, heads, tokens, h·d/heads)`."""
    batch, old, tokens, width = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads, old * width // heads).transpose(1, 2)
