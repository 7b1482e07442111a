"""The mechanisms: how tokens talk. One file each, or one per close family; a file registers what it holds.

A new one is a file in this folder with `@register(...)`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

from linvit.attention.linear import (
    Constant,
    Direction,
    EluPlusOne,
    Feature,
    Formula,
    Fusion,
    LinearAttention,
    Normaliser,
    ReLU,
    RowSum,
    Sigmoid,
    Unnormalised,
    regroup,
)
from linvit.attention.local import (
    GridConv,
    NormShortcut,
    TokenConv,
    WithDynamic,
    WithLocal,
    begin_at_zero,
    values_at_queries,
)
from linvit.attention.mechanism import Call, Capabilities, Mechanism, Shape, Size, TokenGrid, lift
from linvit.attention.options import ConvWidth, Count, Eps, Number, Range
from linvit.attention.plugins import VARIABLE, import_plugins
from linvit.attention.rotary import Rotary
from linvit.codec import check_keywords, keywords
from linvit.errors import LinvitError, unknown

__all__ = [
    "Call", "Capabilities", "Constant", "ConvWidth", "Count", "Direction", "EluPlusOne", "Eps", "Feature", "Formula",
    "Fusion", "GridConv", "LinearAttention", "Mechanism", "NormShortcut", "Normaliser", "Number", "Range", "ReLU",
    "Rotary", "RowSum", "Shape", "Sigmoid", "Size", "TokenConv", "TokenGrid", "Unnormalised", "begin_at_zero",
    "check_options", "create_attention", "lift", "list_mechanisms", "mechanism_class", "options_of", "register",
    "regroup", "values_at_queries",
]  # fmt: skip

_MECHANISMS: dict[str, type[Mechanism]] = {}
_complete = False  # whether other packages were asked for theirs
BRANCHES: dict[str, type[WithLocal]] = {"local": WithLocal, "dynamic": WithDynamic}  # options of every mechanism
IMPLEMENTATIONS = ("auto", "triton", "reference")


def register(name: str, *, paper: str) -> Callable[[type[Mechanism]], type[Mechanism]]:
    """Class decorator: make a mechanism known under `name`."""

    def add(cls: type[Mechanism]) -> type[Mechanism]:
        if name in _MECHANISMS:
            raise LinvitError(f"a mechanism named '{name}' is registered already")
        cls.name, cls.paper = name, paper
        _MECHANISMS[name] = cls
        return cls

    return add


def registry() -> dict[str, type[Mechanism]]:
    """All mechanisms by name, with those of other packages."""
    global _complete
    if not _complete:
        _complete = True  # before they are imported, for they may ask as well
        try:
            import_plugins()
        except LinvitError:
            _complete = False
            raise
    return _MECHANISMS


def list_mechanisms() -> list[str]:
    """Names of all mechanisms, sorted."""
    return sorted(registry())


def mechanism_class(name: str) -> type[Mechanism]:
    """The class registered under `name`."""
    if name not in registry():
        own = f"one of your own has to be imported, or named by --import or {VARIABLE}"
        raise LinvitError(f"{unknown('mechanism', name, registry())} ({own})")
    return registry()[name]


def options_of(name: str) -> dict[str, Any]:
    """The options a mechanism takes beside its shape, with their defaults."""
    return {option: default for option, (_, default) in declared(mechanism_class(name)).items()}


def declared(cls: type[Mechanism]) -> dict[str, tuple[Any, Any]]:
    """The type and the default of every option, as the constructors of a mechanism's classes annotate them."""
    found: dict[str, tuple[Any, Any]] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Mechanism) and "__init__" in vars(base):
            found |= keywords(base.__init__)
    variant = found.pop("variant", None)
    if variant is not None and cls.variants:
        found["variant"] = (Literal[cls.variants] | None, variant[1])
    family = {option: kind for option, kind in keywords(cls.share).items() if option in cls.shared}
    return {**found, **family, **dict.fromkeys(BRANCHES, (ConvWidth | Literal[0], 0))}


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A mechanism's options as its constructor takes them. One that it does not have, or a value of another type or out
    of range, is an error: here, once, for Python, the command line and saved models."""
    kinds = {option: kind for option, (kind, _) in declared(mechanism_class(name)).items()}
    return check_keywords(options, kinds, name)


def create_attention(
    name: str, *, heads: int | None = None, head_dim: int | None = None, value_dim: int | None = None,
    dim: int | None = None, grid: TokenGrid | None = None, impl: str = "auto", **options: Any,
) -> Mechanism:  # fmt: skip
    """Build a mechanism by name. Those with parameters of their own need the shape they are built for. Beside its own
    options, every mechanism takes `local`, the width of a convolution of the values that is added to its output, and
    `dynamic`, the width of one whose filters are made from each image."""
    cls = mechanism_class(name)
    if impl not in IMPLEMENTATIONS:
        raise unknown("implementation", impl, IMPLEMENTATIONS)
    own = check_options(name, options)
    shared = {option: own.pop(option) for option in list(own) if option in cls.shared}
    branches = [(branch, own.pop(option, 0)) for option, branch in BRANCHES.items()]
    mechanism = cls(Shape(heads, head_dim, value_dim, dim, grid), **own)
    mechanism.share(**shared)
    for branch, width in branches:
        if width:
            mechanism = branch(mechanism, width)
    mechanism.impl, mechanism.options = impl, options
    return mechanism


for file in iter_modules(__path__):
    import_module(f"{__name__}.{file.name}")
