"""What a classifier gets right, how sure that is, and how far it is from its teacher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.training.contract import BatchSource
from linvit.training.objectives.teacher import Teacher, check_logits, logits_of


@dataclass(frozen=True)
class Evaluation:
    """Per image: the label, the choice, whether the label was among the first five, the cross entropy. With a teacher
    also its choice and KL(teacher ‖ model). All rates are in percent. Where images are not `labelled`, only what the
    teacher says counts."""

    labels: np.ndarray
    chosen: np.ndarray
    among_five: np.ndarray
    classes: tuple[str, ...] = ()
    teacher: np.ndarray | None = None
    divergence: np.ndarray | None = None
    losses: np.ndarray | None = None
    labelled: bool = True

    @property
    def correct(self) -> np.ndarray:
        """Whether each image was got right."""
        return self.chosen == self.labels

    @property
    def broken(self) -> int:
        """For how many images the model gave NaN or infinity."""
        return int((self.chosen < 0).sum())

    @property
    def top1(self) -> float:
        return 100 * float(self.correct.mean())

    @property
    def top5(self) -> float:
        return 100 * float(self.among_five.mean())

    @property
    def standard_error(self) -> float:
        """Of top-1, over the choice of images: what other images of the same kind would change."""
        return float(np.sqrt(self.top1 * (100 - self.top1) / len(self.labels)))

    @property
    def per_class(self) -> dict[str, float]:
        """Top-1 of each class that has images."""
        found = np.unique(self.labels)
        names = {i: self.classes[i] if i < len(self.classes) else str(i) for i in found}
        return {names[i]: 100 * float(self.correct[self.labels == i].mean()) for i in found}

    @property
    def agreement(self) -> float | None:
        """How often model and teacher choose the same class."""
        return None if self.teacher is None else 100 * float((self.teacher == self.chosen).mean())

    @property
    def kl(self) -> float | None:
        """Mean KL(teacher ‖ model), in nats."""
        return None if self.divergence is None else float(self.divergence.mean())

    @property
    def loss(self) -> float | None:
        """Mean cross entropy with the labels, in nats."""
        return None if self.losses is None else float(self.losses.mean())

    def metrics(self) -> dict[str, float]:
        """The numbers, for logs."""
        found: dict[str, Any] = {"agreement": self.agreement, "kl": self.kl}
        if self.labelled:
            right = {"top1": self.top1, "standard_error": self.standard_error, "top5": self.top5, "loss": self.loss}
            found = {**right, **found}
        return {name: value for name, value in found.items() if value is not None}

    def save(self, path: str | Path) -> None:
        """Everything as JSON: with each image's label and choice kept, two runs can be compared image by image."""
        data: dict[str, Any] = {**self.metrics(), "images": len(self.labels)}
        if self.labelled:
            data |= {"per_class": self.per_class, "labels": self.labels.tolist()}
        elif self.teacher is not None:
            data["teacher"] = self.teacher.tolist()
        data["chosen"] = self.chosen.tolist()
        Path(path).write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")


def evaluate(
    model: nn.Module,
    source: BatchSource,
    *,
    classes: Sequence[str] = (),
    teacher: Teacher | None = None,
    labelled: bool = True,
) -> Evaluation:
    """Ask the model about every image of a source that gives each once and in order. Waits for the device only at the
    end. Over several processes, each asks about its own images and all get the whole result."""
    training = model.training
    model.eval()
    rows: list[Tensor] = []
    try:
        with torch.no_grad():
            for images, labels in source.epoch(0):
                rows.append(judge(logits_of(model(images)).float(), labels, teacher(images) if teacher else None))
    finally:
        model.train(training)
    if not rows:
        raise LinvitError("there is no image to evaluate on")
    found = gather(torch.cat(rows).cpu().double().numpy())
    labels, chosen, five, losses, *taught = found.T
    extra: dict[str, Any] = {"losses": losses, "labelled": labelled}
    if teacher:
        extra |= {"teacher": taught[0].astype(np.int64), "divergence": taught[1]}
    return Evaluation(labels.astype(np.int64), chosen.astype(np.int64), five > 0, tuple(classes), **extra)


def judge(logits: Tensor, labels: Tensor, wanted: Tensor | None) -> Tensor:
    """A row for each image: label, choice, whether among the first five, cross entropy, the teacher's choice, KL to
    it."""
    five = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    five = torch.where(logits.isfinite().all(-1, keepdim=True), five, -1)  # NaN and infinity choose nothing
    missed = F.cross_entropy(logits, labels, reduction="none")
    columns = [labels, five[:, 0], (five == labels[:, None]).any(-1), missed]
    if wanted is not None:
        check_logits(logits, wanted)
        apart = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        columns += [wanted.argmax(-1), apart]
    return torch.stack([column.float() for column in columns], dim=1)


def gather(rows: np.ndarray) -> np.ndarray:
    """The rows of all processes in the images' order: image i was with process i mod their number."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return rows
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, rows)
    whole = np.empty((sum(len(part) for part in parts), rows.shape[1]))
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
