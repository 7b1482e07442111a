"""What is timed: a candidate's answer to a batch, or a training step on it.

Of detectors and segmenters both are of the whole model. They are timed with float32 weights under autocast, as they are
trained and evaluated: heads have parts that need float32. In training they learn from objects or labels drawn at
random.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linvit.measurement.model_speed import inference_call, training_call
from linvit.measurement.speed import DTYPES
from linvit.models.dense import DenseModel, Target
from linvit.training.contract import tensors_of

OBJECTS = 8  # on each image

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
    targets = made_up_targets(model, images)
    fused = True if images.is_cuda else None  # as in classification
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=recorded, fused=fused)

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with autocast(images, precision):
            losses: dict[str, Tensor] = forward(images, targets)
            loss = torch.stack([part.float() for part in losses.values()]).sum()
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def compiled_form(model: nn.Module, compiled: bool) -> Callable[..., Any]:
    return torch.compile(model, dynamic=False) if compiled else model


def autocast(images: Tensor, precision: str) -> Any:
    return torch.autocast(images.device.type, dtype=DTYPES[precision], enabled=precision != "fp32")


def made_up_targets(model: DenseModel, images: Tensor) -> Sequence[Target]:
    """Objects, or labels of pixels, at random but always the same ones."""
    generator = torch.Generator().manual_seed(0)
    height, width = images.shape[-2:]
    return [
        {name: value.to(images.device) for name, value in made_up(model, height, width, generator).items()}
        for _ in images
    ]


def made_up(model: DenseModel, height: int, width: int, generator: torch.Generator) -> Target:
    size = torch.tensor([height, width])
    if model.task == "segment":
        return {"size": size, "labels": torch.randint(model.num_classes, (height, width), generator=generator)}
    corners = torch.rand(OBJECTS, 2, generator=generator) * 0.5
    sides = 0.1 + 0.4 * torch.rand(OBJECTS, 2, generator=generator)
    scale = torch.tensor([width, height]).repeat(2)
    found = {"size": size, "boxes": torch.cat((corners, corners + sides), dim=1) * scale}
    found["labels"] = torch.randint(model.num_classes, (OBJECTS,), generator=generator)
    if model.masks:
        rows, columns = torch.arange(height)[:, None], torch.arange(width)
        left, top, right, bottom = found["boxes"].T[:, :, None, None]
        found["masks"] = ((rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)).byte()
    return found


def is_finite(answer: Any) -> bool:
    """Whether there is neither NaN nor infinity in an answer."""
    return all(bool(found.isfinite().all()) for found in tensors_of(answer) if found.is_floating_point())
