"""What is timed: a candidate's answer to a batch, or a training step on it.

Of detectors and segmenters both are of the whole model. They are timed with float32 weights under autocast, as they are
trained and evaluated: heads have parts that need float32. In training they learn from objects or labels drawn at
random.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linvit.measurement import dense_speed
from linvit.measurement.model_speed import inference_call, training_call
from linvit.measurement.speed import DTYPES
from linvit.models.dense import DenseModel
from linvit.training.contract import tensors_of

Call = Callable[[], Any]


def inference_pass(model: nn.Module, images: Tensor, precision: str, *, compiled: bool = False) -> Call:
    """The model's answer to the images."""
    if not isinstance(model, DenseModel):
        return inference_call(model, images, precision, compiled=compiled)
    forward = compiled_form(model.float().eval(), compiled)

    def infer() -> Any:
        with torch.inference_mode(), autocast(images, precision):
            return forward(images)

    return infer


def training_pass(
    model: nn.Module, images: Tensor, precision: str, *, compiled: bool = False, recorded: bool = False
) -> Call:
    """A training step on the images; `recorded` makes one that a CUDA graph can hold."""
    model = model.float().train()
    forward = compiled_form(model, compiled)
    if not isinstance(model, DenseModel):
        return training_call(model, images, precision, forward=forward, recorded=recorded)
    lowered = partial(autocast, images, precision)
    return dense_speed.training_call(model, images, lowered, forward=forward, recorded=recorded)


def compiled_form(model: nn.Module, compiled: bool) -> Callable[..., Any]:
    return torch.compile(model, dynamic=False) if compiled else model


def autocast(images: Tensor, precision: str) -> Any:
    return torch.autocast(images.device.type, dtype=DTYPES[precision], enabled=precision != "fp32")


def is_finite(answer: Any) -> bool:
    """Whether there is neither NaN nor infinity in an answer."""
    return all(bool(found.isfinite().all()) for found in tensors_of(answer) if found.is_floating_point())
