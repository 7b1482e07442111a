"""What a backbone's features are worth: beside its original's, and where there are labels for telling classes apart.

*Without labels*, beside the original: the cosine of each patch's feature and of each image's, and nearest neighbours:
the share of images whose nearest other image, by the cosine of the image's feature, is the one it is to the original.

*kNN*, as DINO does it: the 20 training images nearest by cosine vote for their classes, each with exp(cosine / 0.07).

*Probe*: a linear classifier in closed form, ridge regression on the classes as shares. Features have their mean and
spread over the training set taken out, W = (XᵀX + λnI)⁻¹XᵀY; λ is the one that gets most of every fifth training image
right when the others are fitted, and all are fitted with it then.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.tasks.classify.metrics import gather
from linvit.training.contract import BatchSource
from linvit.training.objectives.final import Features, cosines

NEIGHBOURS, TEMPERATURE = 20, 0.07
PENALTIES = tuple(10.0**power for power in range(1, -7, -1))  # the larger one counts where two are as good
HELD_OUT = 5  # every so many training images one chooses the penalty
CHUNK = 2**12  # images that are compared with all others at once
Ask = Callable[[Tensor], Features]


@dataclass(frozen=True)
class FeatureEvaluation:
    """Per image: with a teacher the cosines, of a pyramid those of each earlier map too, and whether the nearest
    neighbour is the same; with labels, whether kNN and probe are right, by the model's features and the teacher's."""

    images: int
    patch_cosines: np.ndarray | None = None
    class_cosines: np.ndarray | None = None
    map_cosines: tuple[np.ndarray, ...] = ()
    neighbours: np.ndarray | None = None
    knn: np.ndarray | None = None
    probe: np.ndarray | None = None
    teacher_knn: np.ndarray | None = None
    teacher_probe: np.ndarray | None = None
    broken: int = 0  # images with NaN or infinite features

    @property
    def right(self) -> dict[str, np.ndarray]:
        """Whether each image was right, by the metric's name."""
        names = [f.name for f in fields(self) if f.name not in ("images", "broken") and "cosines" not in f.name]
        return {name: found for name in names if (found := getattr(self, name)) is not None}

    def metrics(self) -> dict[str, float]:
        """The numbers, for logs: cosines, of which `cosine` is the mean, and shares in percent."""
        found: dict[str, float] = {}
        if self.patch_cosines is not None and self.class_cosines is not None:
            found = {"patch_cosine": float(self.patch_cosines.mean()), "class_cosine": float(self.class_cosines.mean())}
            found |= {f"map{place}_cosine": float(each.mean()) for place, each in enumerate(self.map_cosines, start=1)}
            found = {"cosine": sum(found.values()) / len(found), **found}
        return found | {name: 100 * float(right.mean()) for name, right in self.right.items()}


@dataclass(frozen=True)
class Gallery:
    """The features of training images and their labels, which kNN and probe are made from."""

    features: Tensor
    labels: Tensor

    def judge(self, features: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Whether kNN and probe are right about images."""
        classes = int(max(self.labels.max(), labels.max())) + 1
        nearest = knn(self.features, self.labels, features, classes)
        chosen = probe(self.features, self.labels, features, classes)
        return (nearest == labels).cpu().numpy(), (chosen == labels).cpu().numpy()


@torch.no_grad()
def collect(ask: Ask, source: BatchSource) -> tuple[Gallery, int]:
    """The image's features of a source that gives each image once and in order, and how many are not finite. Over
    several processes each asks about its own images and all get the whole."""
    parts = [torch.cat([labels[:, None], ask(images).image.float()], dim=1) for images, labels in source.epoch(0)]
    table = joined(parts)
    broken = broken_in(table)
    return Gallery(table[:, 1:], table[:, 0].long()), broken


@torch.no_grad()
def collect_both(ask: Ask, teacher: Ask, source: BatchSource) -> tuple[Gallery, Gallery, Tensor, int]:
    """The same of two models in one pass, and for each image the cosines of patches, image and maps."""
    parts, widths = [], [0]
    for images, labels in source.epoch(0):
        ours, theirs = ask(images), teacher(images)
        alike = torch.stack([cosines(one, other) for one, other in ours.pairs(theirs)], dim=1)
        columns = [labels[:, None].float(), ours.image.float(), theirs.image.float(), alike]
        widths = [column.shape[1] for column in columns]
        parts.append(torch.cat(columns, dim=1))
    table = joined(parts)
    broken = broken_in(table)
    known, own, other, near = table.split(widths, dim=1)
    return Gallery(own, known[:, 0].long()), Gallery(other, known[:, 0].long()), near, broken


def joined(parts: list[Tensor]) -> Tensor:
    """The rows of all batches and processes."""
    if not parts:
        raise LinvitError("there is no image to evaluate on")
    return torch.from_numpy(gather(torch.cat(parts).cpu().numpy())).to(parts[0].device)


def broken_in(table: Tensor) -> int:
    """How many rows are not finite, which become zeros: of no direction, near nothing."""
    broken = int((~table.isfinite()).any(1).sum())
    table.nan_to_num_(0.0, 0.0, 0.0)
    return broken


def nearest(features: Tensor) -> Tensor:
    """For each image the place of the other one that is nearest by cosine."""
    unit = torch.nn.functional.normalize(features.float(), dim=1)
    found = []
    for start in range(0, len(unit), CHUNK):
        alike = unit[start : start + CHUNK] @ unit.T
        rows = torch.arange(len(alike), device=alike.device)
        alike[rows, rows + start] = -torch.inf
        found.append(alike.argmax(1))
    return torch.cat(found)


def knn(features: Tensor, labels: Tensor, asked: Tensor, classes: int, k: int = NEIGHBOURS) -> Tensor:
    """The classes that the nearest training images vote for."""
    known, unit = (torch.nn.functional.normalize(each.float(), dim=1) for each in (features, asked))
    found = []
    for part in unit.split(CHUNK):
        alike, places = (part @ known.T).topk(min(k, len(known)), dim=1)
        votes = torch.zeros(len(part), classes, device=part.device)
        votes.scatter_add_(1, labels[places], (alike / TEMPERATURE).exp())
        found.append(votes.argmax(1))
    return torch.cat(found)


def probe(features: Tensor, labels: Tensor, asked: Tensor, classes: int) -> Tensor:
    """The classes that ridge regression gives images."""
    held = torch.arange(len(labels), device=labels.device) % HELD_OUT == HELD_OUT - 1
    penalty = PENALTIES[0]
    if bool(held.any()) and bool((~held).any()):
        choose = ridge(features[~held], labels[~held], classes)
        right = [int((choose(features[held], each) == labels[held]).sum()) for each in PENALTIES]
        penalty = PENALTIES[right.index(max(right))]
    return ridge(features, labels, classes)(asked, penalty)


def ridge(features: Tensor, labels: Tensor, classes: int) -> Callable[[Tensor, float], Tensor]:
    """Ridge regression for any penalty, by one eigendecomposition: a function of images' features and a penalty that
    gives their classes. Sums are in float64."""
    rows = features.double()
    mean, spread = rows.mean(0), rows.std(0, correction=0)
    spread = torch.where(spread > 1e-12 * spread.max().clamp(min=1e-300), spread, torch.ones_like(spread))
    rows = (rows - mean) / spread
    shares = torch.nn.functional.one_hot(labels, classes).double()
    offset = shares.mean(0)
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    turned = vectors.T @ (rows.T @ (shares - offset))

    def choose(asked: Tensor, penalty: float) -> Tensor:
        weights = vectors @ (turned / (values.clamp(min=0) + penalty * len(rows))[:, None])
        return (((asked.double() - mean) / spread) @ weights + offset).argmax(1)

    return choose
