"""What a classifier gets right, how sure that is, how far it is from its teacher, and how two models differ.

A run differs from the next by its seed, and a test set from the next by its images; the same seeds and images for both
models take much of either out of the difference. With d[s, i] = (a right) − (b right) for seed s and image i, and the
two-way model d = μ + seed + image + rest, the variance of the mean over S seeds and I images is

    (MS_seed + MS_image − MS_rest) / (S·I)

from the mean squares of the table, and its degrees of freedom are Satterthwaite's. The interval is Student's t. With
one seed only images vary. Beside it stands the interval for these very images, which the seeds alone decide (paired t
over the seeds' means): use it for what was measured, the wider one for what is claimed of other images.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
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
    classes: Sequence[str] = ()
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
        rates = {i: 100 * float(self.correct[self.labels == i].mean()) for i in np.unique(self.labels)}
        return {self.classes[i] if i < len(self.classes) else str(i): rate for i, rate in rates.items()}

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
        names = ("top1", "standard_error", "top5", "loss") if self.labelled else ()
        found = {name: getattr(self, name) for name in (*names, "agreement", "kl")}
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


def evaluate(model: nn.Module, source: BatchSource, teacher: Teacher | None = None, **facts: Any) -> Evaluation:
    """Ask the model about every image of a source that gives each once and in order. Waits for the device only at the
    end. Over several processes, each asks about its own images and all get the whole result. `facts` are the set's
    `classes` and whether it is `labelled`."""
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
    if teacher:
        facts |= {"teacher": taught[0].astype(np.int64), "divergence": taught[1]}
    return Evaluation(labels.astype(np.int64), chosen.astype(np.int64), five > 0, losses=losses, **facts)


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
    whole = np.empty((sum(len(part) for part in parts), rows.shape[1]), rows.dtype)
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


@dataclass(frozen=True)
class PairedDifference:
    """In points of accuracy, a minus b."""

    mean: float
    interval: tuple[float, float]  # over seeds and images
    seeds_interval: tuple[float, float] | None  # over seeds, for these images; none with a single seed
    seeds: int
    images: int


def paired_difference(a: Any, b: Any, *, level: float = 0.95) -> PairedDifference:
    """How much better a is than b. Both are tables of right and wrong, `(seeds, images)` or `(images,)`, whose rows
    belong together seed by seed and whose columns are the same images."""
    first, second = (np.atleast_2d(np.asarray(table, dtype=np.float64)) for table in (a, b))
    if first.shape != second.shape or first.size == 0:
        raise LinvitError(f"cannot pair results of shape {first.shape} and {second.shape}: same seeds, same images")
    table = 100 * (first - second)
    seeds, images = table.shape
    if images < 2:
        raise LinvitError("one image says nothing about a difference")
    mean = float(table.mean())
    rows, columns = table.mean(1), table.mean(0)
    if seeds == 1:
        return PairedDifference(mean, around(mean, table.var(ddof=1) / images, images - 1, level), None, 1, images)
    of_seeds, of_images = images * rows.var(ddof=1), seeds * columns.var(ddof=1)
    rest = table - rows[:, None] - columns + mean
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (images - 1))
    total = max(of_seeds + of_images - of_rest, of_seeds, of_images)  # the sum falls below its parts only by chance
    parts = of_seeds**2 / (seeds - 1) + of_images**2 / (images - 1)
    freedom = total**2 / parts if parts > 0 else float(seeds - 1)
    whole = around(mean, total / table.size, freedom, level)
    return PairedDifference(mean, whole, around(mean, rows.var(ddof=1) / seeds, seeds - 1, level), seeds, images)


def around(mean: float, variance: float, freedom: float, level: float) -> tuple[float, float]:
    half = float(stats.t.ppf((1 + level) / 2, freedom) * np.sqrt(variance))
    return mean - half, mean + half
