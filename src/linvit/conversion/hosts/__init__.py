"""The hosts, one file per family of timm models."""

from torch import nn

from linvit.conversion.host import Host
from linvit.conversion.hosts.beit import BeitHost
from linvit.conversion.hosts.cait import ClassAttnHost, TalkingHeadHost
from linvit.conversion.hosts.coat import CoaTHost
from linvit.conversion.hosts.convit import GPSAHost, MHSAHost
from linvit.conversion.hosts.crossvit import CrossViTHost
from linvit.conversion.hosts.davit import DaViTHost
from linvit.conversion.hosts.edgenext import EdgeNeXtHost
from linvit.conversion.hosts.efficientformer import EfficientFormerV1Host
from linvit.conversion.hosts.efficientformer_v2 import EfficientFormerDownsampleHost, EfficientFormerHost
from linvit.conversion.hosts.efficientvit import EfficientViTHost
from linvit.conversion.hosts.efficientvit_msra import CascadedHost
from linvit.conversion.hosts.fastvit import FastViTHost
from linvit.conversion.hosts.gcvit import GCViTHost
from linvit.conversion.hosts.gemma4 import Gemma4Host
from linvit.conversion.hosts.hiera import HieraHost
from linvit.conversion.hosts.hieradet import HieraDetHost
from linvit.conversion.hosts.levit import LevitDownsampleHost, LevitHost
from linvit.conversion.hosts.lowformer import CPUBoneHost, LowFormerHost
from linvit.conversion.hosts.maxxvit import MaxxHost, MaxxPictureHost
from linvit.conversion.hosts.metaformer import MetaFormerHost
from linvit.conversion.hosts.mobilenet import MultiQueryHost, PictureHost
from linvit.conversion.hosts.mvitv2 import MViTv2Host
from linvit.conversion.hosts.nest import NestHost
from linvit.conversion.hosts.nextvit import NextViTHost
from linvit.conversion.hosts.parallel import DiffHost, DiffParallelHost, ParallelHost
from linvit.conversion.hosts.pvt_v2 import PVTv2Host
from linvit.conversion.hosts.relpos import RelPosHost
from linvit.conversion.hosts.rope import EvaHost, RopeHost
from linvit.conversion.hosts.sam import SAMHost
from linvit.conversion.hosts.single_head import IFormerHost, SHViTHost
from linvit.conversion.hosts.swin import SwinHost
from linvit.conversion.hosts.swin_v2 import SwinV2CrHost, SwinV2Host
from linvit.conversion.hosts.tiny_vit import TinyViTHost
from linvit.conversion.hosts.tnt import TNTHost
from linvit.conversion.hosts.twins import TwinsGlobalHost, TwinsLocalHost
from linvit.conversion.hosts.visformer import VisformerHost
from linvit.conversion.hosts.vit import ViTHost
from linvit.conversion.hosts.volo import VOLOClassHost, VOLOHost
from linvit.conversion.hosts.xcit import XCAHost
from linvit.errors import LinvitError

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
    BeitHost,
    TalkingHeadHost,
    ClassAttnHost,
    GPSAHost,
    MHSAHost,
    Gemma4Host,
    HieraHost,
    HieraDetHost,
    ParallelHost,
    DiffHost,
    DiffParallelHost,
    RelPosHost,
    RopeHost,
    EvaHost,
    SAMHost,
    TNTHost,
    VOLOHost,
    VOLOClassHost,
    XCAHost,
    CoaTHost,
    CrossViTHost,
    DaViTHost,
    EdgeNeXtHost,
    EfficientFormerV1Host,
    CascadedHost,
    FastViTHost,
    GCViTHost,
    CPUBoneHost,
    LowFormerHost,
    MaxxHost,
    MaxxPictureHost,
    MetaFormerHost,
    MultiQueryHost,
    PictureHost,
    NestHost,
    NextViTHost,
    IFormerHost,
    SHViTHost,
    SwinV2CrHost,
    SwinV2Host,
    TinyViTHost,
    TwinsGlobalHost,
    TwinsLocalHost,
    VisformerHost,
)
BY_ORIGINAL: dict[type[nn.Module], type[Host]] = {host.original: host for host in HOSTS}


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
