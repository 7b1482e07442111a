"""Faster R-CNN (Ren et al., 2015) and Mask R-CNN (He et al., 2017) with a feature pyramid, from torchvision's modules.

torchvision's own models resize and normalise images; here the loader has done that, and the maps come from any
backbone. Anchors, sampling, heads and thresholds are torchvision's defaults.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork

from linvit.errors import LinvitError
from linvit.models.dense import DenseModel, Target, sizes_of
from linvit.models.detectors.regions import (
    Anchors,
    BoxPredictor,
    MaskPredictor,
    ProposalHead,
    RoIAlign,
    pasted,
    usable,
)
from linvit.models.fpn import by_level, feature_pyramid

if TYPE_CHECKING:
    from linvit.models.backbones import Backbone


class RCNN(DenseModel):
    """A backbone, a pyramid, proposals, and heads that judge them; what the kinds of R-CNN share.

    `width` is the pyramid's and the mask heads', `hidden` the box heads'. In evaluation the best `proposals` of an
    image go to the heads; in training twice as many are made, and `samples` of them learned from. At most `detections`
    above `score_threshold` are given."""

    task = "detect"

    def __init__(
        self,
        backbone: "Backbone",
        num_classes: int = 80,
        *,
        width: int = 256,
        anchor_sizes: Sequence[int] = (32, 64, 128, 256, 512),
        anchor_ratios: Sequence[float] = (0.5, 1.0, 2.0),
        proposals: int = 1000,
        samples: int = 512,
        hidden: int = 1024,
        score_threshold: float = 0.05,
        nms_threshold: float = 0.5,
        detections: int = 100,
    ) -> None:
        super().__init__()
        self.backbone, self.num_classes = backbone, num_classes
        self.neck = feature_pyramid(backbone.channels, width, pooled=True)
        strides = (*backbone.strides, 2 * backbone.strides[-1])
        if len(anchor_sizes) != len(strides):
            raise LinvitError(f"anchor_sizes are one for each stride of {strides}, got {tuple(anchor_sizes)}")
        self.rpn = RegionProposalNetwork(
            Anchors(anchor_sizes, anchor_ratios, strides),
            ProposalHead(width, len(anchor_ratios)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * proposals, "testing": proposals},
            post_nms_top_n={"training": 2 * proposals, "testing": proposals},
            nms_thresh=0.7,
        )
        self.roi_heads = self.make_heads(
            width,
            hidden,
            batch_size_per_image=samples,
            score_thresh=score_threshold,
            nms_thresh=nms_threshold,
            detections_per_img=detections,
        )

    def make_heads(self, width: int, hidden: int, **limits: Any) -> nn.Module:
        """What judges proposals, as torchvision's RoIHeads: maps, proposals, sizes and targets to detections and
        losses."""
        raise NotImplementedError

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"backbone": [self.backbone], "neck": [self.neck], "head": [self.rpn, self.roi_heads]}

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Any:
        whole = (images.shape[-2], images.shape[-1])
        sizes = sizes_of(images, targets)
        shapes = [whole] * len(images)
        if sizes is not None and targets is not None:
            shapes = [(int(height), int(width)) for height, width in (target["size"] for target in targets)]
        learned = self.learned(targets, shapes, images) if self.training else None
        maps = self.neck(by_level(self.backbone(images, sizes)))
        proposals, losses = self.rpn(ImageList(images, shapes), maps, learned)
        detections, others = self.roi_heads(maps, proposals, shapes, learned)
        if self.training:
            return {**losses, **others}
        return [self.finished(found, shape) for found, shape in zip(detections, shapes, strict=True)]

    def learned(self, targets: Sequence[Target] | None, shapes: list[tuple[int, int]], images: Tensor) -> list[Target]:
        """The targets as the heads learn from them."""
        if targets is None:
            raise LinvitError("a detector in training wants targets: give them, or call model.eval() first")
        if self.masks and not all("masks" in target for target in targets):
            raise LinvitError(f"{type(self).__name__} learns masks too: give every target 'masks', or use faster_rcnn")
        dtype = torch.promote_types(images.dtype, torch.float32)
        return [usable(target, shape, dtype) for target, shape in zip(targets, shapes, strict=True)]

    def finished(self, found: Target, shape: tuple[int, int]) -> Target:
        """A detection as ours: labels from 0, masks as large as the image without its padding."""
        masks = {"masks": pasted(found["masks"], found["boxes"], shape)} if "masks" in found else {}
        return {"boxes": found["boxes"], "scores": found["scores"], "labels": found["labels"] - 1, **masks}


class FasterRCNN(RCNN):
    def make_heads(self, width: int, hidden: int, **limits: Any) -> nn.Module:
        strides, masks = self.backbone.strides, dict[str, nn.Module]()
        if self.masks:
            masks = {
                "mask_roi_pool": RoIAlign(14, strides),
                "mask_head": MaskRCNNHeads(width, (width,) * 4, dilation=1),
                "mask_predictor": MaskPredictor(width, width, self.num_classes + 1),
            }
        return RoIHeads(
            RoIAlign(7, strides),
            TwoMLPHead(width * 7**2, hidden),
            BoxPredictor(hidden, self.num_classes),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            positive_fraction=0.25,
            bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
            **masks,
            **limits,
        )


class MaskRCNN(FasterRCNN):
    """Faster R-CNN with a mask of 28×28 for each detection, pasted into the image."""

    masks = True
