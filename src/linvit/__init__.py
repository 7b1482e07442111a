"""linvit makes the attention of vision transformers linear, and shows honestly what that buys."""

from linvit.attention import TokenGrid, create_attention, list_mechanisms
from linvit.errors import LinvitError
from linvit.version import __version__

__all__ = ["LinvitError", "TokenGrid", "__version__", "create_attention", "list_mechanisms"]
