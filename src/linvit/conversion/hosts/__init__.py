"""The hosts, one file per family of timm models: importing a file makes its hosts known."""

from torch import nn

from linvit.conversion.host import BY_ORIGINAL, Host
from linvit.conversion.hosts import (  # noqa: F401
    beit,
    cait,
    coat,
    convit,
    crossvit,
    davit,
    edgenext,
    efficientformer,
    efficientformer_v2,
    efficientvit,
    efficientvit_msra,
    fastvit,
    gcvit,
    gemma4,
    hiera,
    hieradet,
    levit,
    lowformer,
    maxxvit,
    metaformer,
    mobilenet,
    mvitv2,
    nest,
    nextvit,
    parallel,
    pvt_v2,
    relpos,
    rope,
    sam,
    single_head,
    swin,
    swin_v2,
    tiny_vit,
    tnt,
    twins,
    visformer,
    vit,
    volo,
    xcit,
)
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
