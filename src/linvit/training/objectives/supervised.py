"""Losses on labels: cross entropy and binary cross entropy, for labels and for the soft targets of mixup.

Smoothing happens here and nowhere else: smoothing a mixture is mixing the smoothed, so timm's way, which smooths while
it mixes, gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import unknown
from linvit.training.contract import Batch, Objective

LOSSES = ("cross_entropy", "bce")


class Supervised(Objective):
    """The objective of plain training. A batch is images and targets: labels `(batch,)` or shares of classes `(batch,
    classes)`.

    `threshold` is for bce: targets above it count as one, the rest as zero.
    """

    def __init__(self, loss: str = "cross_entropy", *, smoothing: float = 0.0, threshold: float | None = None) -> None:
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        self.loss, self.smoothing = loss, smoothing
        self.bce = BinaryCrossEntropy(smoothing=0.0, target_threshold=threshold)

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, targets = batch
        logits = logits_of(model(images))
        return {"loss": self.measure(logits, targets), "accuracy": accuracy(logits, targets)}

    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of these logits."""
        if self.loss == "cross_entropy":
            return F.cross_entropy(logits.float(), targets, label_smoothing=self.smoothing)
        return self.bce(logits.float(), smoothed(targets, logits.shape[-1], self.smoothing))


def smoothed(targets: Tensor, classes: int, smoothing: float) -> Tensor:
    """Shares of classes, with a part of them spread over all."""
    shares = F.one_hot(targets, classes).float() if targets.ndim == 1 else targets
    return shares * (1 - smoothing) + smoothing / classes


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """The share of images whose largest logit is the label; of a mixture, its larger part."""
    labels = targets if targets.ndim == 1 else targets.argmax(-1)
    return (logits.detach().argmax(-1) == labels).float().mean()


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: Hugging Face names them, distilled models in training give two and mean them."""
    output = getattr(output, "logits", output)
    if isinstance(output, tuple | list):
        return torch.stack([part for part in output if isinstance(part, Tensor)]).mean(0)
    return output
