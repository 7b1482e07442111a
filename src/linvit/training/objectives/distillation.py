"""Distillation: a student learns what a teacher says of the same augmented images.

soft    KL divergence at a temperature, times its square (Hinton)
hard    cross entropy with the teacher's choice as the label (DeiT)
token   hard, for the distillation head of a distilled model, while the class head learns from the labels (DeiT)

Features of inner modules can be matched beside it. Where widths differ, the student's features are first mapped to the
teacher's by the linear map that fits this batch best: there is nothing to train, to save or to forget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import LinvitError, unknown
from linvit.training.contract import Batch, Objective
from linvit.training.objectives.activations import Activations
from linvit.training.objectives.supervised import Supervised, accuracy, logits_of
from linvit.training.objectives.teacher import Teacher, check_logits, check_teacher

KINDS = ("soft", "hard", "token")
RIDGE = 1e-4


class Distance(nn.Module):
    """`feature_error` as a module: a step that is compiled block by block has it compiled too, for it reads the whole
    stream several times over."""

    def forward(self, ours: Tensor, theirs: Tensor) -> Tensor:
        return feature_error(ours, theirs)


class Compared(Objective):
    """An objective that asks a teacher, and compares what modules of both models give, the student's with the
    teacher's by name."""

    teacher: Teacher
    distance: Distance

    def __init__(self, teacher: Teacher, student: nn.Module, pairs: Mapping[str, str]) -> None:
        self.teacher, self.distance, self.pairs = teacher, Distance(), pairs
        self.ours = Activations(student, outputs=pairs)
        self.theirs = Activations(teacher.model, outputs=set(pairs.values()))

    def reset(self) -> None:
        self.ours.take()
        self.theirs.take()

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()

    def ask(self, model: nn.Module, images: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """The model's output, the teacher's logits, and how far each pair is apart."""
        self.theirs.record()
        wanted = self.teacher(images)
        self.ours.record()
        output = model(images)
        seen, shown = self.ours.take()[1], self.theirs.take()[1]
        errors = [self.distance(seen[ours], shown[theirs]) for ours, theirs in self.pairs.items()]
        return output, wanted, torch.stack(errors) if errors else None


class Distillation(Compared):
    """The objective, of images and targets. `weight` is the teacher's share of the loss, the rest is the labels'.
    `features` names modules, the same in both models or the student's with the teacher's, and is added with
    `feature_weight`. Without labels, not `labelled`, the teacher's share is all there is."""

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
        named = features if isinstance(features, Mapping) else {name: name for name in features}
        super().__init__(teacher, student, named)
        self.kind, self.weight, self.temperature = kind, weight, temperature
        self.supervised, self.labelled = supervised or Supervised(), labelled
        self.feature_weight = feature_weight

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, targets = batch
        output, wanted, errors = self.ask(model, images)
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
        if errors is not None:
            entries["features"] = errors.mean().detach()
            loss = loss + self.feature_weight * errors.mean()
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


def best_map(ours: Tensor, theirs: Tensor) -> Tensor:
    """The matrix that maps one set of rows to the other with the least squared error, with a small ridge."""
    with torch.autocast(ours.device.type, enabled=False):
        gram = ours.T @ ours
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
        return torch.linalg.solve_ex(gram + ridge, ours.T @ theirs)[0]
