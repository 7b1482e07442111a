"""Losses on labels, and distillation: a student learns what a teacher says of the same augmented images.

Labels may be the soft targets of mixup. Smoothing happens here and nowhere else: smoothing a mixture is mixing the
smoothed, so timm's way, which smooths while it mixes, gives the same numbers.

soft    KL divergence at a temperature, times its square (Hinton)
hard    cross entropy with the teacher's choice as the label (DeiT)
token   hard, for the distillation head of a distilled model, while the class head learns from the labels (DeiT)

Features of inner modules can be matched beside it. Where widths differ, the student's features are first mapped to the
teacher's by the linear map that fits this batch best: there is nothing to train, to save or to forget.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import LinvitError, unknown
from linvit.training.config import CHOICES
from linvit.training.contract import Batch, Objective
from linvit.training.objectives.teacher import Activations, Teacher, check_logits, check_teacher, logits_of

RIDGE = 1e-4


class Supervised(Objective):
    """The objective of plain training. A batch is images and targets: labels `(batch,)` or shares of classes `(batch,
    classes)`."""

    def __init__(self, loss: str = "cross_entropy", *, smoothing: float = 0.0) -> None:
        if loss not in CHOICES["loss"]:
            raise unknown("loss", loss, CHOICES["loss"])
        self.loss, self.smoothing = loss, smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, targets = batch
        logits = logits_of(model(images))
        return {"loss": self.measure(logits, targets), "accuracy": accuracy(logits, targets)}

    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of these logits."""
        if self.loss == "cross_entropy":
            return F.cross_entropy(logits.float(), targets, label_smoothing=self.smoothing)
        classes = logits.shape[-1]
        shares = F.one_hot(targets, classes).float() if targets.ndim == 1 else targets
        smoothed = shares * (1 - self.smoothing) + self.smoothing / classes
        return F.binary_cross_entropy_with_logits(logits.float(), smoothed)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """The share of images whose largest logit is the label; of a mixture, its larger part."""
    labels = targets if targets.ndim == 1 else targets.argmax(-1)
    return (logits.detach().argmax(-1) == labels).float().mean()


class Distance(nn.Module):
    """The relative error of features, after the best linear map where the widths differ. Channels come last in
    sequences and first, after the batch, in pictures. A module, so that a step that is compiled block by block has it
    compiled too, for it reads the whole stream several times over."""

    def forward(self, ours: Tensor, theirs: Tensor) -> Tensor:
        if ours.ndim == 4 and theirs.ndim == 4 and ours.shape[2:] == theirs.shape[2:]:
            ours, theirs = ours.flatten(2).transpose(1, 2), theirs.flatten(2).transpose(1, 2)
        if ours.shape[:-1] != theirs.shape[:-1]:
            raise LinvitError(f"features {tuple(ours.shape)} and {tuple(theirs.shape)} are not of the same places")
        if ours.shape[-1] != theirs.shape[-1]:
            ours = ours.float() @ best_map(ours.detach().flatten(0, -2).float(), theirs.flatten(0, -2).float())
        return relative_error(ours, theirs)


class Compared(Objective):
    """An objective that asks a teacher, and compares what modules of both models give, the student's with the
    teacher's by name."""

    teacher: Teacher
    distance: Distance

    def __init__(self, teacher: Teacher, student: nn.Module, pairs: Mapping[str, str]) -> None:
        self.teacher, self.distance, self.pairs = teacher, Distance(), pairs
        watched = ((student, pairs), (teacher.model, {*pairs.values()}))
        self.activations = [Activations(model, outputs=names) for model, names in watched]

    def ask(self, model: nn.Module, images: Tensor) -> tuple[Any, Any, Tensor | None]:
        """The model's output, the teacher's, and how far each pair is apart."""
        ours, theirs = self.activations
        theirs.record()
        wanted = self.teacher.output(images)
        ours.record()
        output = model(images)
        seen, shown = ours.take()[1], theirs.take()[1]
        errors = [self.distance(seen[name], shown[other]) for name, other in self.pairs.items()]
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
        if kind not in CHOICES["distillation"][1:]:
            raise unknown("distillation", kind, CHOICES["distillation"][1:])
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
        output, answer, errors = self.ask(model, images)
        wanted = logits_of(answer).float()
        logits, heard = self.heads(output)
        check_logits(heard, wanted)
        taught = self.compare(heard, wanted)
        if self.weight == 1 and heard is not logits:  # the other head has nobody else to learn from
            taught = (taught + self.compare(logits, wanted)) / 2
        entries = {"distillation": taught.detach()}
        if self.labelled:
            labels = self.supervised.measure(logits, targets)
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


def best_map(ours: Tensor, theirs: Tensor) -> Tensor:
    """The matrix that maps one set of rows to the other with the least squared error, with a small ridge."""
    with torch.autocast(ours.device.type, enabled=False):
        gram = ours.T @ ours
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
        return torch.linalg.solve_ex(gram + ridge, ours.T @ theirs)[0]
