"""Distillation: a student learns what a teacher says of the same augmented images.

soft    KL divergence at a temperature, times its square (Hinton)
hard    cross entropy with the teacher's choice as the label (DeiT)
token   hard, for the distillation head of a distilled model, while the class head learns from the labels (DeiT)

Features of inner modules can be matched beside it. Where widths differ, the student's features are first mapped to the
teacher's by the linear map that fits this batch best: there is nothing to train, to save or to forget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.conversion import load
from linvit.conversion.saving import label_names
from linvit.errors import LinvitError, unknown, unknown_model
from linvit.training.losses import Supervised, accuracy, logits_of
from linvit.training.taps import Taps

KINDS = ("soft", "hard", "token")
RIDGE = 1e-4


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


def open_teacher(source: str | Path, *, pretrained: bool = True, **options: Any) -> nn.Module:
    """A teacher by name: a folder that `linvit.save` wrote, or a timm model, pretrained."""
    if Path(source).is_dir():
        return load(source)
    if not timm.is_model(str(source).removeprefix("hf-hub:").split(".")[0]) and ":" not in str(source):
        raise unknown_model("teacher", str(source), timm.list_models())
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it tells of every retry; one line comes at the end
    try:
        return timm.create_model(str(source), pretrained=pretrained, **options)
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
        raise LinvitError(f"teacher {source} cannot be loaded ({reason}): give the folder of a saved one") from None


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


class Distillation:
    """The objective. `weight` is the teacher's share of the loss, the rest is the labels'. `features` names modules,
    the same in both models or the student's with the teacher's, and is added with `feature_weight`. Without labels, not
    `labelled`, the teacher's share is all there is."""

    def __init__(
        self,
        teacher: Teacher,
        student: nn.Module,
        *,
        kind: str = "soft",
        weight: float = 0.5,
        temperature: float = 1.0,
        supervised: Supervised | None = None,
        features: Sequence[str] | Mapping[str, str] = (),
        feature_weight: float = 1.0,
        labelled: bool = True,
    ) -> None:
        if kind not in KINDS:
            raise unknown("distillation", kind, KINDS)
        if not labelled and weight < 1:
            raise LinvitError(f"without labels the teacher's share of the loss is 1, not {weight:g}")
        check_teacher(teacher.model, student)
        if kind == "token":
            distilled = getattr(student, "set_distilled_training", None)
            if distilled is None:
                raise LinvitError(f"token distillation needs a distilled model: {type(student).__name__} has one head")
            distilled(True)
        self.teacher, self.kind, self.weight, self.temperature = teacher, kind, weight, temperature
        self.supervised, self.labelled = supervised or Supervised(), labelled
        pairs = dict(features) if isinstance(features, Mapping) else {name: name for name in features}
        self.pairs, self.feature_weight, self.distance = pairs, feature_weight, Distance()
        self.ours, self.theirs = Taps(student, pairs), Taps(teacher.model, set(pairs.values()))

    def rest(self) -> None:
        """Listen to neither model any more, whatever happened."""
        self.ours.take()
        self.theirs.take()

    def close(self) -> None:
        """Take the hooks off both models."""
        self.ours.close()
        self.theirs.close()

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        self.theirs.listen()
        wanted = self.teacher(images)
        self.ours.listen()
        output = model(images)
        seen, shown = self.ours.take()[1], self.theirs.take()[1]
        logits, heard = self.heads(output)
        check_logits(heard, wanted)
        labels = self.supervised.measure(logits, targets) if self.labelled else None
        taught = self.compare(heard, wanted)
        if self.weight == 1 and heard is not logits:  # the other head has nobody else to learn from
            taught = (taught + self.compare(logits, wanted)) / 2
        entries = {"distillation": taught.detach()}
        if labels is not None:
            loss = (1 - self.weight) * labels + self.weight * taught
            entries = {"accuracy": accuracy(logits, targets), "labels": labels.detach(), **entries}
        else:
            loss, entries["agreement"] = taught, accuracy(heard, wanted.argmax(-1))
        if self.pairs:
            errors = [self.distance(seen[ours], shown[theirs]) for ours, theirs in self.pairs.items()]
            entries["features"] = torch.stack(errors).mean().detach()
            loss = loss + self.feature_weight * torch.stack(errors).mean()
        return {"loss": loss, **entries}

    def heads(self, output: Any) -> tuple[Tensor, Tensor]:
        """The logits that learn from the labels, and those that learn from the teacher."""
        if self.kind != "token":
            logits = logits_of(output)
            return logits, logits
        if not isinstance(output, tuple):
            raise LinvitError("token distillation needs both heads: the model must be in training mode")
        return output[0], output[1]

    def compare(self, heard: Tensor, wanted: Tensor) -> Tensor:
        if self.kind == "soft":
            return divergence(heard, wanted, self.temperature)
        return F.cross_entropy(heard.float(), wanted.argmax(-1))


def check_logits(heard: Tensor, wanted: Tensor) -> None:
    """The number of classes again, where the models did not say it."""
    if heard.shape[-1] != wanted.shape[-1]:
        classes = f"{wanted.shape[-1]} classes, the student {heard.shape[-1]}"
        raise LinvitError(f"the teacher has {classes}: choose a teacher of the same classes")


def divergence(heard: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher ‖ student) at a temperature, times its square, so that gradients keep their size."""
    ours = F.log_softmax(heard.float() / temperature, dim=-1)
    theirs = F.log_softmax(wanted.float() / temperature, dim=-1)
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """The squared error over the variance of what is wanted, over images: 0 is perfect, 1 as good as the mean.

    So layers of any scale weigh the same, and what is the same in every image does not hide what is not."""
    ours, theirs = ours.float(), theirs.float()
    spread = theirs.var(0, correction=0) if len(theirs) > 1 else theirs.square()
    return F.mse_loss(ours, theirs) / spread.mean().clamp(min=1e-12)


def feature_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """The relative error of features, after the best linear map where the widths differ. Channels come last in
    sequences and first, after the batch, in pictures."""
    if ours.ndim == 4 and theirs.ndim == 4 and ours.shape[2:] == theirs.shape[2:]:
        ours, theirs = ours.flatten(2).transpose(1, 2), theirs.flatten(2).transpose(1, 2)
    if ours.shape[:-1] != theirs.shape[:-1]:
        raise LinvitError(f"features {tuple(ours.shape)} and {tuple(theirs.shape)} are not of the same places")
    if ours.shape[-1] != theirs.shape[-1]:
        ours = ours.float() @ best_map(ours.detach().flatten(0, -2).float(), theirs.flatten(0, -2).float())
    return relative_error(ours, theirs)


class Distance(nn.Module):
    """`feature_error` as a module: a step that is compiled block by block has it compiled too, for it reads the whole
    stream several times over."""

    def forward(self, ours: Tensor, theirs: Tensor) -> Tensor:
        return feature_error(ours, theirs)


def best_map(ours: Tensor, theirs: Tensor) -> Tensor:
    """The matrix that maps one set of rows to the other with the least squared error, with a small ridge."""
    with torch.autocast(ours.device.type, enabled=False):
        gram = ours.T @ ours
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
        return torch.linalg.solve_ex(gram + ridge, ours.T @ theirs)[0]
