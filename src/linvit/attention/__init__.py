"""The mechanisms: how tokens talk. One file each, or one per close family."""

from importlib import import_module
from pkgutil import iter_modules

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
)
from linvit.attention.local import GridConv, NormShortcut, TokenConv, begin_at_zero, regroup, values_at_queries
from linvit.attention.mechanism import Call, Capabilities, Mechanism, Shape, Size, TokenGrid, lift
from linvit.attention.registry import create_attention, list_mechanisms, mechanism_class, options_of, register

__all__ = [
    "Call", "Capabilities", "Constant", "Direction", "EluPlusOne", "Feature", "Formula", "Fusion", "GridConv",
    "LinearAttention", "Mechanism", "NormShortcut", "Normaliser", "ReLU", "RowSum", "Shape", "Sigmoid", "Size",
    "TokenConv", "TokenGrid", "Unnormalised", "begin_at_zero", "create_attention", "lift", "list_mechanisms",
    "mechanism_class", "options_of", "register", "regroup", "values_at_queries",
]  # fmt: skip

for file in iter_modules(__path__):
    import_module(f"{__name__}.{file.name}")  # which registers what it holds
