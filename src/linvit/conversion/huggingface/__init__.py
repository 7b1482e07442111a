"""Hugging Face's vision models: their hosts, one file per kind of attention, how they are built again, and how
transformers' own Auto classes open what linvit saved.

Needs `pip install linvit[transformers]`; nothing imports this folder without.
"""

from torch import nn

from linvit.conversion.host import BY_ORIGINAL, Host
from linvit.conversion.huggingface import auto, pooled, sequences, windows  # noqa: F401
from linvit.conversion.huggingface.building import PREFIX, from_config, open_folder, origin_of
from linvit.conversion.huggingface.interface import vision_host

__all__ = ["HOSTS", "PREFIX", "from_config", "host_in_transformers", "open_folder", "origin_of"]

HOSTS = tuple(host for host in BY_ORIGINAL.values() if host.__module__.startswith(__name__))


def host_in_transformers(module: nn.Module) -> type[Host] | None:
    """The host of a transformers module. Attention over text, in the same classes, has none."""
    return vision_host(module)
