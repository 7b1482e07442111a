"""Losses of one-stage detectors."""

import torch
from torch import Tensor
from torch.nn import functional as F

NEGATIVE_WEIGHT = 0.75
SHORT_OF_LAST = 0.1  # distances end so far before the last bin, as there is none to share with behind it


def varifocal_loss(logits: Tensor, quality: Tensor) -> Tensor:
    """Binary cross entropy with the quality of each answer, which is the IoU for the right class and 0 elsewhere. Good
    answers weigh by their quality, wrong ones by the square of how sure they are (arXiv 2008.13367). No reduction."""
    weight = torch.where(quality > 0, quality, NEGATIVE_WEIGHT * logits.sigmoid() ** 2)
    return weight * F.binary_cross_entropy_with_logits(logits, quality, reduction="none")


def distribution_focal_loss(logits: Tensor, distance: Tensor) -> Tensor:
    """Cross entropy with the two bins around a distance, which share it by nearness (arXiv 2006.04388). Logits have a
    last axis of bins 0, 1, …; distances beyond them count as the nearest. No reduction."""
    distance = distance.clamp(0, logits.shape[-1] - 1 - SHORT_OF_LAST)
    low = distance.floor()
    chances = logits.log_softmax(-1)
    left, right = (chances.gather(-1, place.long()[..., None])[..., 0] for place in (low, low + 1))
    return -(left * (low + 1 - distance) + right * (distance - low))


def paired_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of each box with its partner; 0 where neither has an area."""
    first = torch.maximum(boxes[..., :2], others[..., :2])
    last = torch.minimum(boxes[..., 2:], others[..., 2:])
    shared = (last - first).clamp(min=0).prod(-1)
    one, other = ((each[..., 2:] - each[..., :2]).prod(-1) for each in (boxes, others))
    return shared / (one + other - shared).clamp(min=torch.finfo(shared.dtype).tiny)
