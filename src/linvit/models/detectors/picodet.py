"""PicoDet, a light one-stage detector (arXiv 2111.00902), in the form of its first release and on any backbone.

Every cell of four maps, at strides 8 to 64, gives class scores and how far the four sides of a box are, each as a
distribution over 0 to 7 strides. SimOTA chooses the cells that learn an object; scores learn the IoU of their box.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import batched_nms, generalized_box_iou_loss

from linvit.errors import LinvitError, unknown
from linvit.models.backbones.maps import inside, places
from linvit.models.dense import DenseModel, Target, per_process, sizes_of
from linvit.models.detectors.csp_pan import CSPPAN, Separable
from linvit.models.detectors.losses import distribution_focal_loss, paired_iou, varifocal_loss
from linvit.models.detectors.simota import assign

if TYPE_CHECKING:
    from linvit.models.backbones import Backbone

SIZES = {"s": (96, 2), "m": (128, 4), "l": (160, 4)}  # width, and convolutions of the head
STRIDES = (8, 16, 32, 64)
BINS = 8
PRIOR = 0.01  # score of every class at the start
BOX_WEIGHT, DISTANCE_WEIGHT = 2.0, 0.25
LEAST_SCORE, LEVEL_CELLS, MOST_OVERLAP, KEPT = 0.025, 1000, 0.6, 100  # of detections


class PicoHead(nn.Module):
    """Class logits and logits of distances, from convolutions that each level has for itself and that both share."""

    def __init__(self, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.levels = nn.ModuleList(nn.ModuleList(Separable(width) for _ in range(depth)) for _ in STRIDES)
        self.out = nn.ModuleList(nn.Conv2d(width, num_classes + 4 * BINS, 1) for _ in STRIDES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
                if module.bias is not None:
                    nn.init.constant_(module.bias, math.log(PRIOR / (1 - PRIOR)))

    def forward(self, maps: Sequence[Tensor], padding: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """`(batch, cells, classes)` and `(batch, cells, 4, bins)`, in float32 at least."""
        found = []
        for x, blocks, out, outside in zip(maps, self.levels, self.out, padding, strict=True):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, outside)
            found.append(out(x).flatten(2).transpose(1, 2))
        logits, distances = torch.cat(found, dim=1).split((self.num_classes, 4 * BINS), dim=-1)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(dtype), distances.to(dtype).unflatten(-1, (4, BINS))


class PicoDet(DenseModel):
    """PicoDet of a `size`: s, m or l."""

    task = "detect"

    def __init__(self, backbone: "Backbone", num_classes: int, size: str = "m") -> None:
        super().__init__()
        if size not in SIZES:
            raise unknown("size of PicoDet", size, SIZES)
        width, depth = SIZES[size]
        self.num_classes = num_classes
        self.backbone = backbone
        self.neck = CSPPAN(backbone.channels[1:], width)
        self.head = PicoHead(width, depth, num_classes)

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"backbone": [self.backbone], "neck": [self.neck], "head": [self.head]}

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Any:
        if self.training and targets is None:
            raise LinvitError("PicoDet learns from targets: give them, or call eval() to detect")
        height, width = images.shape[-2:]
        sizes = sizes_of(images, targets)
        grids = [places((height, width), stride) for stride in STRIDES]
        padding: list[Tensor | None] = [None] * len(STRIDES)
        if sizes is not None:
            padding = [~inside(sizes, stride, grid) for stride, grid in zip(STRIDES, grids, strict=True)]
        unused, *maps = self.backbone(images, sizes)
        logits, distances = self.head(self.neck(maps, padding[:-1]), padding)
        cells = Cells(grids, padding, logits)
        boxes = cells.boxes(distances)
        if targets is not None and self.training:
            found = losses(logits, distances, boxes, cells, targets)
            found["score"] = found["score"] + 0 * unused.mean()  # DistributedDataParallel waits for its gradient
            return found
        ends = [(height, width)] * len(images) if sizes is None else sizes.tolist()
        scores = logits.sigmoid() * cells.usable[..., None]
        return [detections(*each, cells) for each in zip(scores, boxes, ends, strict=True)]


class Cells:
    """The cells of all maps in a row: `centres` `(cells, 2)` as x, y, their `strides`, how many each level has, and
    which are `usable` `(batch, cells)` as they are not in the padding."""

    def __init__(self, grids: Sequence[tuple[int, int]], padding: Sequence[Tensor | None], like: Tensor) -> None:
        centres, strides = [], []
        for (height, width), stride in zip(grids, STRIDES, strict=True):
            y, x = ((torch.arange(side, device=like.device) + 0.5).to(like) * stride for side in (height, width))
            centres.append(torch.cartesian_prod(y, x).flip(-1))
            strides.append(like.new_full((height * width,), stride))
        self.centres, self.strides = torch.cat(centres), torch.cat(strides)
        self.counts = [height * width for height, width in grids]
        hidden = [each.flatten(1) for each in padding if each is not None]
        self.usable = ~torch.cat(hidden, dim=1) if hidden else like.new_ones(like.shape[:2], dtype=torch.bool)

    def boxes(self, distances: Tensor) -> Tensor:
        """What the distributions expect. Not by a matrix product, which autocast would make in half precision."""
        sides = (distances.softmax(-1) * torch.arange(BINS, device=distances.device)).sum(-1) * self.strides[:, None]
        return torch.cat((self.centres - sides[..., :2], self.centres + sides[..., 2:]), dim=-1)

    def sides(self, boxes: Tensor) -> Tensor:
        """How far the sides of boxes are, in strides."""
        return torch.cat((self.centres - boxes[..., :2], boxes[..., 2:] - self.centres), dim=-1) / self.strides[:, None]


def losses(
    logits: Tensor, distances: Tensor, boxes: Tensor, cells: Cells, targets: Sequence[Target]
) -> dict[str, Tensor]:
    """Varifocal loss of all cells that see their image; GIoU and distribution focal loss of those with an object,
    weighted by how sure they are. Every cell is computed and the others left out after it, so nothing waits."""
    truths, labels, positive = (torch.stack(each) for each in zip(*objects(logits, boxes, cells, targets), strict=True))
    quality = torch.zeros_like(logits)
    quality.scatter_(-1, labels[..., None], (paired_iou(boxes.detach(), truths) * positive)[..., None])
    score = varifocal_loss(logits, quality).sum(-1) * cells.usable
    weight = logits.detach().sigmoid().amax(-1) * positive
    weight = weight / per_process(weight.sum())
    box = generalized_box_iou_loss(boxes, truths)
    distance = distribution_focal_loss(distances, cells.sides(truths)).mean(-1)
    return {
        "score": score.sum() / per_process(positive.sum()),
        "box": BOX_WEIGHT * (weight * box).sum(),
        "distance": DISTANCE_WEIGHT * (weight * distance).sum(),
    }


def objects(
    logits: Tensor, boxes: Tensor, cells: Cells, targets: Sequence[Target]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each image the box and the label that each cell has to learn, and whether it has. Boxes end where their image
    ends; those that lie outside have no area then, and no cell."""
    for image, target in enumerate(targets):
        ends = target["size"].to(boxes).flip(0).repeat(2)
        truths = target["boxes"].to(boxes).reshape(-1, 4).clamp(min=0).minimum(ends)
        labels = target["labels"].to(boxes.device).long()
        place = (cells.centres, cells.strides, truths, labels, cells.usable[image])
        matched = assign(logits[image].detach(), boxes[image].detach(), *place)
        # −1 finds the zeros at the end, of which nothing is learnt
        yield F.pad(truths, (0, 0, 0, 1))[matched], F.pad(labels, (0, 1))[matched], matched >= 0


def detections(scores: Tensor, boxes: Tensor, size: Sequence[int], cells: Cells) -> dict[str, Tensor]:
    """The best boxes of an image, of which no two of a class overlap much."""
    best = [level.topk(min(LEVEL_CELLS, len(level))).indices for level in scores.amax(1).split(cells.counts)]
    firsts = accumulate([0, *cells.counts[:-1]])
    kept = torch.cat([first + level for first, level in zip(firsts, best, strict=True)])
    height, width = size
    boxes = boxes[kept].clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))
    shown = (boxes[:, 2:] > boxes[:, :2]).all(-1, keepdim=True)
    cell, labels = ((scores[kept] > LEAST_SCORE) & shown).nonzero(as_tuple=True)
    boxes, scores = boxes[cell], scores[kept][cell, labels]
    kept = batched_nms(boxes, scores, labels, MOST_OVERLAP)[:KEPT]
    return {"boxes": boxes[kept], "scores": scores[kept], "labels": labels[kept]}
