"""SimOTA: which anchors learn which objects, by what they cost (arXiv 2107.08430, with PicoDet's costs).

Anchors are the centres of map cells. Those within a box, or within 2.5 strides of its middle, are candidates. A pair of
candidate and object costs its varifocal loss plus 6 times its GIoU loss; pairs that are not within both box and middle
come after all that are. An object takes as many of its cheapest anchors as its ten largest IoUs sum up to, one at the
least; an anchor that several objects take goes to the one that costs least.
"""

import torch
from torch import Tensor
from torchvision.ops import box_iou, generalized_box_iou

from linvit.models.detectors.losses import varifocal_loss

MOST = 10  # anchors of an object
MIDDLE = 2.5  # strides from an object's centre
GIOU_WEIGHT = 6.0


@torch.no_grad()
def assign(
    logits: Tensor, boxes: Tensor, centres: Tensor, strides: Tensor, truths: Tensor, labels: Tensor, usable: Tensor
) -> Tensor:
    """For each anchor the index of its object, or −1.

    Anchors have class `logits` `(anchors, classes)`, predicted `boxes`, `centres` `(anchors, 2)` and `strides`
    `(anchors,)`; `usable` ones are not in the padding. Objects are `truths` `(objects, 4)` and `labels`; those without
    area get no anchor. Nothing here waits for the device.
    """
    if not len(truths):
        return torch.full((len(boxes),), -1, device=boxes.device)
    edges = torch.cat((centres[:, None] - truths[:, :2], truths[:, 2:] - centres[:, None]), dim=-1)
    middles = (truths[:, :2] + truths[:, 2:]) / 2
    in_box = (edges > 0).all(-1)
    in_middle = ((centres[:, None] - middles).abs() < MIDDLE * strides[:, None, None]).all(-1)
    real = (truths[:, 2:] > truths[:, :2]).all(-1)
    candidates = ((in_box | in_middle) & real).any(1) & usable
    possible = candidates[:, None] & real

    iou = box_iou(boxes, truths).masked_fill(~possible, 0)
    negative = varifocal_loss(logits, torch.zeros_like(logits))
    missed = negative.sum(1, keepdim=True) - negative[:, labels] + varifocal_loss(logits[:, labels], iou)
    cost = missed + GIOU_WEIGHT * (1 - generalized_box_iou(boxes, truths))
    cost = cost + torch.where(in_box & in_middle, 0, 1 + cost.masked_fill(~possible, 0).amax())
    cost = cost.masked_fill(~possible, torch.inf)

    most = min(MOST, len(boxes))
    wanted = iou.topk(most, dim=0).values.sum(0).int().clamp(min=1)
    cheapest = cost.topk(most, dim=0, largest=False)
    taken = (torch.arange(most, device=boxes.device)[:, None] < wanted) & cheapest.values.isfinite()
    takers = torch.zeros_like(possible).scatter(0, cheapest.indices, taken)
    chosen = torch.where(takers.sum(1) > 1, cost.argmin(1), takers.int().argmax(1))
    return torch.where(takers.any(1), chosen, -1)
