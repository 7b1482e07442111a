"""The hosts, one file per kind of attention: importing a file makes its hosts known.

The docstring of a host says what is exact and what is given up; one without belongs to the host before it.
"""

from torch import nn

from linvit.conversion.host import BY_ORIGINAL, Host
from linvit.conversion.hosts import offsets, pictures, pooled, relative, sequences, vit, windows  # noqa: F401
from linvit.errors import LinvitError

HOSTS = tuple(BY_ORIGINAL.values())  # of timm's modules


def host_for(module: nn.Module) -> type[Host] | None:
    """The host class of an attention module, converted or not; None for any other module."""
    if isinstance(module, Host):
        return type(module)
    if type(module).__module__.startswith("transformers."):
        try:
            from linvit.conversion.huggingface import host_in_transformers
        except ImportError as error:
            raise LinvitError(f"this transformers is too old ({error}): pip install linvit[transformers]") from None
        return host_in_transformers(module)
    return BY_ORIGINAL.get(type(module))


def host_of(module: nn.Module) -> type[Host]:
    """The host class of a module that is known to be an attention module."""
    host = host_for(module)
    assert host is not None, f"{type(module).__name__} has no host"
    return host
