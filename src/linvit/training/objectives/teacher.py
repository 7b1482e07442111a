"""The model that a student learns from."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from linvit.conversion.opening import open_model
from linvit.conversion.saving import label_names
from linvit.errors import LinvitError
from linvit.training.objectives.supervised import logits_of


class Teacher:
    """A model that is asked and never changed. It runs in its parameters' own precision, or in `precision` by autocast,
    which saves time where the student trains in half precision anyway. Images come normalised for the `student`; where
    the teacher knows other colour statistics, they are changed to those."""

    def __init__(
        self, model: nn.Module, *, student: nn.Module | None = None, precision: torch.dtype | None = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.precision = precision
        first = next(model.parameters())
        self.dtype = first.dtype
        self.colours = None if student is None else other_colours(student, model)
        if self.colours is not None:
            self.colours = tuple(value.to(first.device) for value in self.colours)

    def __call__(self, images: Tensor) -> Tensor:
        """The logits."""
        if self.colours is not None:
            scale, shift = self.colours
            images = images * scale.to(images.dtype) + shift.to(images.dtype)
        with torch.no_grad(), self.arithmetic(images):
            return logits_of(self.model(images.to(self.dtype))).float()

    def arithmetic(self, like: Tensor) -> AbstractContextManager[Any]:
        lowered = self.precision is not None and self.precision != self.dtype
        return torch.autocast(like.device.type, dtype=self.precision if lowered else None, enabled=lowered)


def other_colours(student: nn.Module, teacher: nn.Module) -> tuple[Tensor, ...] | None:
    """What takes images from the student's colour statistics to the teacher's, a factor and a summand for each channel;
    none where they are the same, as far as timm knows."""
    first = next((module for module in student.modules() if isinstance(module, nn.Conv2d)), None)
    pairs = []
    for known in (timm.data.resolve_model_data_config(model) for model in (student, teacher)):
        colours = torch.tensor([known["mean"], known["std"]])
        channels = first.in_channels if first is not None else colours.shape[1]
        pairs.append(colours if channels == colours.shape[1] else colours.mean(1, keepdim=True).expand(-1, channels))
    if torch.equal(*pairs):
        return None
    (our_mean, our_std), (their_mean, their_std) = pairs
    scale, shift = our_std / their_std, (our_mean - their_mean) / their_std
    return tuple(value.view(-1, 1, 1) for value in (scale, shift))


def open_teacher(source: str | Path, *, pretrained: bool = True, **args: Any) -> nn.Module:
    """A teacher by name: a folder that `linvit.save` wrote, or a timm model, pretrained."""
    instead = "the folder of a saved one"
    return open_model(str(source), pretrained=pretrained, args=args, what="teacher", instead=instead)


def check_teacher(teacher: nn.Module, student: nn.Module) -> None:
    """Whether both speak of the same classes, as far as they say how many and which."""
    theirs, ours = (getattr(model, "num_classes", None) for model in (teacher, student))
    if theirs and ours and theirs != ours:
        raise LinvitError(f"the teacher has {theirs} classes, the student {ours}: choose a teacher of the same classes")
    for place, names in enumerate(zip(label_names(teacher), label_names(student), strict=False)):
        if len({*names}) > 1 and all(names):
            raise LinvitError(
                f"output {place} is {names[0]} to the teacher and {names[1]} to the student: "
                "choose a teacher that was trained on the same classes"
            )


def check_logits(heard: Tensor, wanted: Tensor) -> None:
    """The number of classes again, where the models did not say it."""
    if heard.shape[-1] != wanted.shape[-1]:
        classes = f"{wanted.shape[-1]} classes, the student {heard.shape[-1]}"
        raise LinvitError(f"the teacher has {classes}: choose a teacher of the same classes")
