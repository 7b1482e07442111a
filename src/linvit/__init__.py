"""linvit makes the attention of vision transformers linear, and shows honestly what that buys.

Public names load on first use, so that `import linvit` and `linvit --help` do not wait for PyTorch. A new one goes in
both places below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linvit.errors import LinvitError
from linvit.timm_import import register_models
from linvit.version import __version__

if TYPE_CHECKING:
    from linvit.attention import TokenGrid, create_attention, list_mechanisms
    from linvit.conversion import convert, load, load_weights, resample_patches, resample_windows, save
    from linvit.models import list_models

_HOMES = {
    "TokenGrid": "linvit.attention",
    "convert": "linvit.conversion",
    "create_attention": "linvit.attention",
    "list_mechanisms": "linvit.attention",
    "list_models": "linvit.models",
    "load": "linvit.conversion",
    "load_weights": "linvit.conversion",
    "resample_patches": "linvit.conversion",
    "resample_windows": "linvit.conversion",
    "save": "linvit.conversion",
}

__all__ = [
    "LinvitError",
    "TokenGrid",
    "__version__",
    "convert",
    "create_attention",
    "list_mechanisms",
    "list_models",
    "load",
    "load_weights",
    "resample_patches",
    "resample_windows",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'linvit' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


register_models()
