"""The hosts, one file per family of timm models."""

from torch import nn

from linvit.conversion.host import Host
from linvit.conversion.hosts.efficientformer_v2 import EfficientFormerDownsampleHost, EfficientFormerHost
from linvit.conversion.hosts.efficientvit import EfficientViTHost
from linvit.conversion.hosts.levit import LevitDownsampleHost, LevitHost
from linvit.conversion.hosts.mvitv2 import MViTv2Host
from linvit.conversion.hosts.pvt_v2 import PVTv2Host
from linvit.conversion.hosts.swin import SwinHost
from linvit.conversion.hosts.vit import ViTHost

HOSTS: tuple[type[Host], ...] = (
    ViTHost,
    SwinHost,
    PVTv2Host,
    LevitHost,
    LevitDownsampleHost,
    MViTv2Host,
    EfficientFormerHost,
    EfficientFormerDownsampleHost,
    EfficientViTHost,
)
BY_ORIGINAL: dict[type[nn.Module], type[Host]] = {host.original: host for host in HOSTS}


def host_for(module: nn.Module) -> type[Host] | None:
    """The host class of an attention module, converted or not; None for any other module."""
    if isinstance(module, Host):
        return type(module)
    return BY_ORIGINAL.get(type(module))
