"""How well a segmenter gives pixels their class: mIoU, mAcc and pAcc, as fractions.

All come from one table of pixels, true class by chosen class, summed over the images and not averaged per image:

    IoU = right / (true + chosen − right),  Acc = right / true  for each class,  pAcc = right / all  over all of them

mIoU and mAcc are means over classes. As in mmsegmentation, a class counts for mIoU where pixels have it or were given
it, and for mAcc where pixels have it. Pixels of label 255 are not judged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.models.dense import IGNORED


@dataclass(frozen=True)
class SegmentationMetrics:
    """The table of pixels, `(classes, classes + 1)`: the last column holds those for which the model chose nothing."""

    categories: tuple[str, ...]
    table: np.ndarray

    @property
    def right(self) -> np.ndarray:
        return self.table.diagonal()

    @property
    def iou(self) -> np.ndarray:
        """Of each class; NaN where no pixel has it and none was given it."""
        return divide(self.right, self.table.sum(1) + self.table[:, :-1].sum(0) - self.right)

    @property
    def accuracy(self) -> np.ndarray:
        """Of each class, the share of its pixels that were got right; NaN where no pixel has it."""
        return divide(self.right, self.table.sum(1))

    @property
    def per_class(self) -> dict[str, float]:
        """IoU by name of the classes that pixels have or were given."""
        named = zip(self.categories, self.iou.tolist(), strict=True)
        return {name: iou for name, iou in named if not np.isnan(iou)}

    @property
    def broken(self) -> int:
        """For how many pixels the model gave NaN or infinity; they count as wrong."""
        return int(self.table[:, -1].sum())

    def metrics(self) -> dict[str, float]:
        """The numbers, for logs."""
        pixels = float(self.right.sum() / self.table.sum())
        return {"mIoU": float(np.nanmean(self.iou)), "mAcc": float(np.nanmean(self.accuracy)), "pAcc": pixels}


class SegmentationMeter:
    """Adds up the table batch by batch. With several processes, each has one, and one of them, or a new one, merges
    the states of the others."""

    def __init__(self, categories: Sequence[str]) -> None:
        try:
            from torchmetrics.classification import MulticlassConfusionMatrix
        except ImportError:
            raise LinvitError("mIoU comes from torchmetrics: pip install linvit[dense]") from None
        self.categories = tuple(categories)
        # One class more than there are, for pixels that get none. Without checks of its own it never waits.
        self.counts: Any = MulticlassConfusionMatrix(
            len(self.categories) + 1, ignore_index=IGNORED, validate_args=False
        )

    def add(self, predictions: Iterable[Tensor], truths: Iterable[Tensor]) -> None:
        """Judge some images by the label of each pixel, `(height, width)`, that was chosen and that is true. What is no
        category counts as nothing chosen. Counting is done on the host, and the device is waited for once."""
        labels, chosen = [], []
        for found, truth in zip(predictions, truths, strict=True):
            truth = truth.cpu()
            self.refuse_strangers(truth)
            if found.shape != truth.shape:
                given = f"predicted labels of {tuple(found.shape)} do not fit the truth of {tuple(truth.shape)}"
                raise LinvitError(f"{given}: bring them to its size")
            known = (found >= 0) & (found < len(self.categories))
            chosen.append(torch.where(known, found, len(self.categories)).to(torch.uint8).flatten())
            labels.append(truth.flatten().long())
        if labels:
            self.counts.update(torch.cat(chosen).cpu().long(), torch.cat(labels))

    def refuse_strangers(self, truth: Tensor) -> None:
        strange = truth[(truth != IGNORED) & ((truth < 0) | (truth >= len(self.categories)))]
        if len(strange):
            label, names = int(strange[0]), len(self.categories)
            raise LinvitError(f"a pixel has label {label}, but there are {names} categories and 255 for none of them")

    def state(self) -> np.ndarray:
        """The table so far, to send to another process."""
        return self.counts.confmat[:-1].cpu().numpy().astype(np.int64)

    def merge(self, state: np.ndarray) -> None:
        """Add the state of another process."""
        whole = F.pad(torch.as_tensor(state), (0, 0, 0, 1)).to(self.counts.confmat.device)
        self.counts.confmat = self.counts.confmat + whole

    def compute(self) -> SegmentationMetrics:
        table = self.state()
        if not table.sum():
            raise LinvitError("there is no labelled pixel to evaluate on")
        return SegmentationMetrics(self.categories, table)


def divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
