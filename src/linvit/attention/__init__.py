"""The mechanisms: how tokens talk. One file each, or one per close family; a file registers what it holds.

A new one is a file in this folder with `@register(...)`.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

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
from linvit.attention.rotary import Rotary
from linvit.errors import LinvitError, unknown

__all__ = [
    "Call", "Capabilities", "Constant", "Direction", "EluPlusOne", "Feature", "Formula", "Fusion", "GridConv",
    "LinearAttention", "Mechanism", "NormShortcut", "Normaliser", "ReLU", "Rotary", "RowSum", "Shape", "Sigmoid",
    "Size", "TokenConv", "TokenGrid", "Unnormalised", "begin_at_zero", "create_attention", "lift", "list_mechanisms",
    "mechanism_class", "options_of", "register", "regroup", "values_at_queries",
]  # fmt: skip

_MECHANISMS: dict[str, type[Mechanism]] = {}
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


def list_mechanisms() -> list[str]:
    """Names of all mechanisms, sorted."""
    return sorted(_MECHANISMS)


def mechanism_class(name: str) -> type[Mechanism]:
    """The class registered under `name`."""
    if name not in _MECHANISMS:
        raise unknown("mechanism", name, _MECHANISMS)
    return _MECHANISMS[name]


def options_of(name: str) -> dict[str, Any]:
    """The options a mechanism takes beside its shape, with their defaults."""
    options: dict[str, Any] = {}
    for cls in reversed(mechanism_class(name).__mro__):
        if issubclass(cls, Mechanism) and "__init__" in vars(cls):
            for parameter in inspect.signature(cls).parameters.values():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    options[parameter.name] = parameter.default
    if not mechanism_class(name).variants:
        options.pop("variant", None)
    return {**options, **mechanism_class(name).shared, **dict.fromkeys(BRANCHES, 0)}


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
    known = options_of(name)
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    shared = {option: value for option, value in options.items() if option in cls.shared}
    own = {option: value for option, value in options.items() if option not in BRANCHES and option not in shared}
    mechanism = cls(Shape(heads, head_dim, value_dim, dim, grid), **own)
    mechanism.share(**shared)
    for option, branch in BRANCHES.items():
        if options.get(option):
            mechanism = branch(mechanism, options[option])
    mechanism.impl, mechanism.options = impl, options
    return mechanism


for file in iter_modules(__path__):
    import_module(f"{__name__}.{file.name}")
