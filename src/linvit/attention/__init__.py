"""The mechanisms: how tokens talk. One file each, or one per close family."""

from linvit.attention import (  # noqa: F401  importing a file registers what it holds
    agent,
    castling,
    cosformer,
    efficient,
    fastformer,
    flatten,
    flow,
    hedgehog,
    hydra,
    inline,
    linformer,
    mobile,
    performer,
    qt,
    relu_linear,
    sima,
    softmax,
    stella,
    window,
    xca,
)
from linvit.attention.grid import TokenGrid
from linvit.attention.mechanism import Capabilities, Mechanism, Shape, Size
from linvit.attention.registry import create_attention, list_mechanisms, mechanism_class, options_of, register

__all__ = [
    "Capabilities",
    "Mechanism",
    "Shape",
    "Size",
    "TokenGrid",
    "create_attention",
    "list_mechanisms",
    "mechanism_class",
    "options_of",
    "register",
]
