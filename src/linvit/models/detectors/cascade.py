"""Cascade Mask R-CNN (Cai and Vasconcelos, 2019): three heads in a row, each on the boxes that the one before refined.

As mmdetection's `cascade_mask_rcnn_r50_fpn` has it, whose parameters QT-ViT's detection table counts: each stage wants
a higher IoU and codes boxes more finely, boxes do not depend on the class, and each stage has a mask head. Boxes come
from the last stage; class logits and mask probabilities are means over the stages.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image

from linvit.models.dense import Target
from linvit.models.detectors.rcnn import RCNN
from linvit.models.detectors.regions import BoxPredictor, MaskPredictor, RoIAlign

Maps = dict[str, Tensor]
Shapes = list[tuple[int, int]]


class CascadeStep(NamedTuple):
    """What sets a stage apart: the IoU from which a proposal is an object, the scale of its deltas, its weight."""

    iou: float
    stds: tuple[float, float, float, float]
    weight: float


STEPS = (
    CascadeStep(0.5, (0.1, 0.1, 0.2, 0.2), 1.0),
    CascadeStep(0.6, (0.05, 0.05, 0.1, 0.1), 0.5),
    CascadeStep(0.7, (0.033, 0.033, 0.067, 0.067), 0.25),
)


class CascadeHead(RoIHeads):
    """One head of the cascade. Matching, sampling and coding are torchvision's, from the base; boxes do not depend on
    the class, and masks have no channel for the background."""

    def __init__(
        self, step: CascadeStep, width: int, num_classes: int, strides: Sequence[int], hidden: int, **args: Any
    ):
        super().__init__(
            RoIAlign(7, strides),
            TwoMLPHead(width * 7**2, hidden),
            BoxPredictor(hidden, num_classes, agnostic=True),
            fg_iou_thresh=step.iou,
            bg_iou_thresh=step.iou,
            positive_fraction=0.25,
            bbox_reg_weights=tuple(1 / std for std in step.stds),
            mask_roi_pool=RoIAlign(14, strides),
            mask_head=MaskRCNNHeads(width, (width,) * 4, dilation=1),
            mask_predictor=MaskPredictor(width, width, num_classes),
            **args,
        )

    def judge(self, maps: Maps, proposals: list[Tensor], shapes: Shapes) -> tuple[Tensor, Tensor]:
        """Class logits and box deltas of all images' proposals."""
        logits, deltas = self.box_predictor(self.box_head(self.box_roi_pool(maps, proposals, shapes)))
        return logits, deltas

    def outline(self, maps: Maps, boxes: list[Tensor], shapes: Shapes) -> Tensor:
        """Mask logits of all images' boxes, a mask for each class."""
        found: Tensor = self.mask_predictor(self.mask_head(self.mask_roi_pool(maps, boxes, shapes)))
        return found

    @torch.no_grad()
    def refine(self, deltas: Tensor, proposals: list[Tensor], shapes: Shapes) -> list[Tensor]:
        """The proposals moved by the deltas, inside their images."""
        moved = self.box_coder.decode_single(deltas, torch.cat(proposals)).split([len(each) for each in proposals])
        return [clip_boxes_to_image(boxes, shape) for boxes, shape in zip(moved, shapes, strict=True)]

    def learn(
        self, maps: Maps, proposals: list[Tensor], shapes: Shapes, targets: list[Target]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Losses, and the sampled proposals refined. Those that are targets, added to have something to learn from,
        are not passed on: the next stage adds its own."""
        proposals, matched, found, goals = self.select_training_samples(proposals, targets)
        labels, wanted = torch.cat(found), torch.cat(goals)
        logits, deltas = self.judge(maps, proposals, shapes)
        positive = labels > 0
        losses = {
            "classifier": F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1),
            "box_reg": F.smooth_l1_loss(deltas[positive], wanted[positive], reduction="sum") / max(len(labels), 1),
        }
        boxes = [each[label > 0] for each, label in zip(proposals, found, strict=True)]
        owners = [each[label > 0] for each, label in zip(matched, found, strict=True)]
        classes = [target["labels"] - 1 for target in targets]
        masks = [target["masks"] for target in targets]
        losses["mask"] = maskrcnn_loss(self.outline(maps, boxes, shapes), boxes, masks, classes, owners)
        refined = zip(self.refine(deltas, proposals, shapes), proposals, targets, strict=True)
        return losses, [boxes[~is_among(each, target["boxes"])] for boxes, each, target in refined]


def is_among(boxes: Tensor, others: Tensor) -> Tensor:
    """Which of the boxes are one of the others, to the last digit."""
    return (boxes[:, None] == others).all(dim=2).any(dim=1)


class CascadeHeads(nn.Module):
    """The stages in the place of torchvision's RoIHeads."""

    def __init__(self, num_classes: int, **args: Any) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stages = nn.ModuleList(CascadeHead(step, num_classes=num_classes, **args) for step in STEPS)

    def forward(
        self, maps: Maps, proposals: list[Tensor], shapes: Shapes, targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        if targets is None:
            return self.detect(maps, proposals, shapes), {}
        losses: dict[str, Tensor] = {}
        stages: Any = self.stages
        for number, (stage, step) in enumerate(zip(stages, STEPS, strict=True), start=1):
            found, proposals = stage.learn(maps, proposals, shapes, targets)
            losses |= {f"loss_{name}_{number}": step.weight * value for name, value in found.items()}
        return [], losses

    def detect(self, maps: Maps, proposals: list[Tensor], shapes: Shapes) -> list[Target]:
        stages: Any = self.stages
        logits, deltas = stages[0].judge(maps, proposals, shapes)
        for before, stage in pairwise(stages):
            proposals = before.refine(deltas, proposals, shapes)
            more, deltas = stage.judge(maps, proposals, shapes)
            logits = logits + more
        for_each_class = deltas.repeat(1, self.num_classes + 1)
        found = stages[-1].postprocess_detections(logits / len(stages), for_each_class, proposals, shapes)
        detections = [dict(zip(("boxes", "scores", "labels"), each, strict=True)) for each in zip(*found, strict=True)]
        boxes, labels = ([each[key] for each in detections] for key in ("boxes", "labels"))
        outlines = [
            maskrcnn_inference(stage.outline(maps, boxes, shapes), [label - 1 for label in labels]) for stage in stages
        ]
        for each, masks in zip(detections, zip(*outlines, strict=True), strict=True):
            each["masks"] = torch.stack(masks).mean(dim=0)
        return detections


class CascadeMaskRCNN(RCNN):
    """Each stage learns from `samples` proposals."""

    masks = True

    def make_heads(self, width: int, hidden: int, **limits: Any) -> nn.Module:
        return CascadeHeads(self.num_classes, width=width, strides=self.backbone.strides, hidden=hidden, **limits)
