"""What torchvision's R-CNN modules lack for our maps: strides that are known, and float32 where boxes are made.

torchvision infers the strides of maps by dividing sizes, which goes wrong where they do not divide or where a batch is
mostly padding; here they are given. Under autocast its anchors have the maps' dtype, and in bfloat16 a position beyond
256 is off by a pixel or more; here anchors, deltas, logits and pooled regions are computed in float32 at least.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.poolers import LevelMapper

from linvit.models.dense import Target

LEVELS = ("0", "1", "2", "3")  # of the pyramid, from which regions are pooled
SMALLEST = 0.01  # pixels; a box narrower or lower than this has no area to learn from
PASTED = 16  # masks at a time: each takes a whole image of float32 before it is thresholded


def full(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Anchors(AnchorGenerator):
    """Boxes of one size for each level and of several shapes, at every place of the maps."""

    def __init__(self, sizes: Sequence[int], ratios: Sequence[float], strides: Sequence[int]) -> None:
        super().__init__(tuple((size,) for size in sizes), (tuple(ratios),) * len(sizes))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        self.set_cell_anchors(torch.promote_types(feature_maps[0].dtype, torch.float32), feature_maps[0].device)
        grids = [list(each.shape[-2:]) for each in feature_maps]
        levels = self.grid_anchors(grids, [[stride, stride] for stride in self.strides])  # type: ignore[list-item]
        return [torch.cat(levels)] * len(image_list.image_sizes)


class ProposalHead(RPNHead):
    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [full(each) for each in logits], [full(each) for each in deltas]


class RoIAlign(MultiScaleRoIAlign):
    """Regions of a pyramid as squares of features, each from the level that suits its size."""

    def __init__(self, output_size: int, strides: Sequence[int]) -> None:
        super().__init__(list(LEVELS), output_size, sampling_ratio=2)
        self.scales = [1 / stride for stride in strides]
        self.map_levels = LevelMapper(*((stride.bit_length() - 1) for stride in (strides[0], strides[-1])))

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        dtype = x[LEVELS[0]].dtype
        return super().forward({name: full(x[name]) for name in LEVELS}, boxes, image_shapes).to(dtype)


class BoxPredictor(FastRCNNPredictor):
    """Class logits, background first, and box deltas; `agnostic` is one box for all classes."""

    def __init__(self, width: int, num_classes: int, *, agnostic: bool = False) -> None:
        super().__init__(width, num_classes + 1)
        if agnostic:
            self.bbox_pred = torch.nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas = super().forward(x)
        return full(logits), full(deltas)


class MaskPredictor(MaskRCNNPredictor):
    def forward(self, x: Tensor) -> Tensor:
        return full(super().forward(x))


def usable(target: Target, size: tuple[int, int], dtype: torch.dtype) -> Target:
    """A target as torchvision's modules want it: boxes inside the image and of some area, background as label 0."""
    boxes = clip_boxes_to_image(target["boxes"].reshape(-1, 4).to(dtype), size)
    kept = (boxes[:, 2:] - boxes[:, :2] >= SMALLEST).all(dim=1)
    found = {"boxes": boxes[kept], "labels": target["labels"][kept].long() + 1}
    return {**found, "masks": target["masks"][kept]} if "masks" in target else found


def pasted(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Mask probabilities of boxes, `(n, 1, side, side)`, as masks of the whole image, `(n, height, width)`."""
    pairs = zip(masks.split(PASTED), boxes.cpu().split(PASTED), strict=True)  # one transfer instead of several a mask
    return torch.cat([paste_masks_in_image(few, of, size)[:, 0] > 0.5 for few, of in pairs])
