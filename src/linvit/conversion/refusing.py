"""What is told of a model that has no attention linvit knows, what it has and what works instead, and of an image size
that a model cannot take."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from linvit.errors import LinvitError, reason

# Models of Hugging Face, by their type, that are the same or the nearest in timm, where their attention has a host.
IN_TIMM = {
    "cvt": "pvt_v2_b2",
    "data2vec-vision": "beit_base_patch16_224",
    "donut-swin": "swin_base_patch4_window12_384",
    "efficientformer": "efficientformer_l1",
    "glpn": "pvt_v2_b4",
    "levit": "levit_256",
    "maskformer-swin": "swin_base_patch4_window12_384",
    "mobilevit": "mobilevit_s",
    "pvt": "pvt_v2_b2",
    "swin2sr": "swinv2_small_window8_256",
    "vitdet": "samvit_base_patch16",
    "yolos": "deit_small_patch16_224",
}


def no_hosts(model: nn.Module) -> LinvitError:
    """The error for a model without attention that linvit knows; what attention it has is named."""
    kinds = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    if not kinds:
        return LinvitError(f"{type(model).__name__} has no attention that linvit can swap")
    library = type(model).__module__.split(".")[0]
    known = f"{library}'s {type(model).__name__} has attention that linvit does not know ({', '.join(kinds[:3])})"
    kind: str = getattr(getattr(model, "config", None), "model_type", "")
    if kind in IN_TIMM:
        return LinvitError(f"{known}: use timm's {IN_TIMM[kind]}, or another of that family")
    return LinvitError(
        f"{known}: take the model from timm or Hugging Face, such as "
        "timm.create_model('vit_base_patch16_224', pretrained=True)"
    )


@contextmanager
def told(size: tuple[int, int]) -> Iterator[None]:
    """A size that a model cannot take is one line."""
    try:
        yield
    except LinvitError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise LinvitError(f"the model cannot take images of {size[0]}×{size[1]}: {reason(error)}") from error
