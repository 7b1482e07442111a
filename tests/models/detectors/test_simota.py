"""SimOTA against plain Python that follows its description, and the losses against values worked by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss

from linvit.models.detectors.losses import distribution_focal_loss, paired_iou, varifocal_loss
from linvit.models.detectors.simota import assign

Box = list[float]


def overlap(one: Box, other: Box) -> tuple[float, float]:
    """IoU and GIoU."""
    width = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    height = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - width * height
    hull = (max(one[2], other[2]) - min(one[0], other[0])) * (max(one[3], other[3]) - min(one[1], other[1]))
    return width * height / area, width * height / area - (hull - area) / hull


def varifocal(score: float, quality: float) -> float:
    loss = -quality * math.log(score) - (1 - quality) * math.log(1 - score)
    return loss * (quality if quality > 0 else 0.75 * score**2)


def by_hand(scores: np.ndarray, boxes: list[Box], anchors: list[list[float]], truths: list[Box], labels: list[int]):
    """The description, one anchor and one object at a time; unlike float32, Python can add 10⁸ to a cost."""
    within, near = {}, {}
    for a, (x, y, stride) in enumerate(anchors):
        for g, (left, top, right, bottom) in enumerate(truths):
            within[a, g] = left < x < right and top < y < bottom
            far = 2.5 * stride
            near[a, g] = abs(x - (left + right) / 2) < far and abs(y - (top + bottom) / 2) < far
    objects = range(len(truths))
    candidates = [a for a in range(len(anchors)) if any(within[a, g] or near[a, g] for g in objects)]
    cost, iou = {}, {}
    for a in candidates:
        for g in objects:
            iou[a, g], giou = overlap(boxes[a], truths[g])
            missed = sum(varifocal(s, iou[a, g] if c == labels[g] else 0) for c, s in enumerate(scores[a].tolist()))
            cost[a, g] = missed + 6 * (1 - giou) + (0 if within[a, g] and near[a, g] else 1e8)
    takers: dict[int, list[int]] = {}
    for g in objects:
        count = max(1, int(sum(sorted((iou[a, g] for a in candidates), reverse=True)[:10])))
        for a in sorted(candidates, key=lambda a: cost[a, g])[:count]:
            takers.setdefault(a, []).append(g)
    return [
        -1 if a not in takers else takers[a][0] if len(takers[a]) == 1 else min(objects, key=lambda g: cost[a, g])
        for a in range(len(anchors))
    ]


def grid(size: int, strides: tuple[int, ...]) -> Tensor:
    return torch.tensor(
        [
            [(x + 0.5) * stride, (y + 0.5) * stride, stride]
            for stride in strides
            for y in range(size // stride)
            for x in range(size // stride)
        ]
    )


def random_case(seed: int, objects: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits, boxes near and far from what is there, anchors, objects that crowd each other, labels."""
    generator = torch.Generator().manual_seed(seed)
    anchors = grid(64, (8, 16, 32))
    corner = torch.rand(objects, 2, generator=generator) * 50
    truths = torch.cat((corner, corner + 1 + torch.rand(objects, 2, generator=generator) * 40), dim=1)
    labels = torch.randint(5, (objects,), generator=generator)
    ends = torch.rand(len(anchors), 4, generator=generator) * 2 * anchors[:, 2:]
    boxes = torch.cat((anchors[:, :2] - ends[:, :2], anchors[:, :2] + ends[:, 2:]), dim=1)
    copied = torch.rand(len(anchors), generator=generator) < 0.4
    noise = torch.randn(len(anchors), 4, generator=generator)
    boxes[copied] = truths[torch.randint(objects, (len(anchors),), generator=generator)][copied] + noise[copied]
    boxes = torch.cat((boxes[:, :2], torch.maximum(boxes[:, 2:], boxes[:, :2] + 0.5)), dim=1)
    return torch.randn(len(anchors), 5, generator=generator) * 2, boxes, anchors, truths, labels


@pytest.mark.parametrize("seed", range(12))
def test_assignment_is_the_one_described(seed: int) -> None:
    logits, boxes, anchors, truths, labels = random_case(seed, objects=1 + seed)
    usable = torch.ones(len(anchors), dtype=torch.bool)
    found = assign(logits, boxes, anchors[:, :2], anchors[:, 2], truths, labels, usable)
    scores = logits.double().sigmoid().numpy()
    wanted = by_hand(scores, boxes.tolist(), anchors.tolist(), truths.tolist(), labels.tolist())
    assert found.tolist() == wanted
    assert (found >= 0).sum() >= 1 + seed // 4


def test_objects_and_anchors_that_are_left_out() -> None:
    logits, boxes, anchors, truths, labels = random_case(3, objects=4)
    usable = anchors[:, 0] < 40
    found = assign(logits, boxes, anchors[:, :2], anchors[:, 2], truths, labels, usable)
    alone = assign(
        logits[usable], boxes[usable], anchors[usable, :2], anchors[usable, 2], truths, labels, usable[usable]
    )
    assert (found[~usable] == -1).all() and torch.equal(found[usable], alone)
    flat = torch.cat((truths, torch.tensor([[10.0, 10, 10, 30], [64, 5, 64, 20]])))
    more = torch.cat((labels, torch.tensor([0, 1])))
    assert torch.equal(assign(logits, boxes, anchors[:, :2], anchors[:, 2], flat, more, usable), found)
    nothing = assign(logits, boxes, anchors[:, :2], anchors[:, 2], truths[:0], labels[:0], usable)
    assert (nothing == -1).all() and nothing.dtype == torch.long
    tiny = torch.tensor([[15.9, 15.9, 16.1, 16.1]])  # between centres: no anchor within it, one has to do
    assert (assign(logits, boxes, anchors[:, :2], anchors[:, 2], tiny, labels[:1], usable) >= 0).sum() == 1


def test_thousands_of_anchors_and_certain_answers() -> None:
    anchors = grid(512, (8, 16, 32, 64))
    boxes = torch.cat((anchors[:, :2], anchors[:, :2]), dim=1)  # of no area
    logits = torch.full((len(anchors), 3), 200.0)
    truths = torch.tensor([[10.0, 10, 400, 300], [300, 20, 310, 500], [0, 0, 512, 512]])
    labels, usable = torch.tensor([0, 2, 1]), torch.ones(len(anchors), dtype=torch.bool)
    found = assign(logits, boxes, anchors[:, :2], anchors[:, 2], truths, labels, usable)
    assert found.unique().tolist() == [-1, 0, 1, 2] and len(found) == 5440


def test_varifocal_loss_worked_by_hand() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 300.0, -300.0], dtype=torch.float64, requires_grad=True)
    quality = torch.tensor([0.0, 0.6, 0.9, 0.0, 0.5], dtype=torch.float64)
    loss = varifocal_loss(logits, quality)
    sure = 1 / (1 + math.exp(-2))
    unsure = 1 / (1 + math.exp(1))
    assert loss[:3].tolist() == pytest.approx(
        [
            0.75 * 0.25 * math.log(2),
            -0.6 * (0.6 * math.log(sure) + 0.4 * math.log(1 - sure)),
            -0.9 * (0.9 * math.log(unsure) + 0.1 * math.log(1 - unsure)),
        ]
    )
    assert loss[3:].tolist() == pytest.approx([0.75 * 300, 0.5 * 150])
    loss.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert torch.autograd.gradcheck(lambda x: varifocal_loss(x, quality[:3]), logits.detach()[:3].requires_grad_())


def test_distribution_focal_loss_worked_by_hand() -> None:
    chances = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    distance = torch.tensor([0.0, 1.25, 2.0, -3.0, 50.0], dtype=torch.float64)
    logits = (chances.log() + 7).expand(5, 4).clone().requires_grad_()
    loss = distribution_focal_loss(logits, distance)
    log = [math.log(value) for value in chances.tolist()]
    shared = 0.75 * log[1] + 0.25 * log[2]
    last = 0.1 * log[2] + 0.9 * log[3]  # beyond the bins counts as 2.9
    assert loss.tolist() == pytest.approx([-log[0], -shared, -log[2], -log[0], -last])
    loss.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    away = logits.grad[1] - (chances - torch.tensor([0, 0.75, 0.25, 0], dtype=torch.float64))
    assert away.abs().max() < 1e-12, "the gradient is what is expected less what is there"


def test_overlaps_worked_by_hand() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 1, 1], [2, 2, 2, 2], [0, 0, 4, 2]], dtype=torch.float64)
    others = torch.tensor([[2.0, 0, 6, 4], [3, 0, 4, 1], [2, 2, 2, 2], [0, 0, 4, 2]], dtype=torch.float64)
    assert paired_iou(boxes, others).tolist() == pytest.approx([8 / 24, 0, 0, 1])
    boxes.requires_grad_()
    loss = generalized_box_iou_loss(boxes, others)
    assert loss.tolist() == pytest.approx([2 / 3, 1 + 2 / 4, 1, 0], abs=1e-6)
    loss.sum().backward()
    assert boxes.grad is not None and boxes.grad.isfinite().all(), "also where neither box has an area"
