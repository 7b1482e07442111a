"""linvit makes the attention of vision transformers linear, and shows honestly what that buys.

Importing it registers the papers' models with timm.
"""

from linvit.attention import TokenGrid, create_attention, list_mechanisms
from linvit.conversion import convert, load, load_weights, resample_patches, resample_windows, save
from linvit.errors import LinvitError
from linvit.models import list_models
from linvit.version import __version__

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
