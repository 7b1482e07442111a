"""A backbone, pictures and targets small enough for tests of detectors."""

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import box_iou

from linvit.models.dense import Target

COLOURS = torch.tensor([[2.0, -1.0, -1.0], [-1.0, 2.0, -1.0], [-1.0, -1.0, 2.0]])


class SmallBackbone(nn.Module):
    """Strided convolutions that give maps at strides 4, 8, 16 and 32."""

    strides = (4, 8, 16, 32)

    def __init__(self, channels: tuple[int, int, int, int] = (16, 24, 24, 32)) -> None:
        super().__init__()
        self.channels = channels
        self.trunk = nn.ModuleList()
        for before, after, stride in zip((3, *channels[:3]), channels, (4, 2, 2, 2), strict=True):
            conv = nn.Conv2d(before, after, 3 if stride == 2 else 7, stride, 1 if stride == 2 else 3)
            self.trunk.append(nn.Sequential(conv, LayerNorm2d(after), nn.ReLU()))

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        maps = []
        for stage in self.trunk:
            images = stage(images)
            maps.append(images)
        return maps


def rectangles(*sizes: tuple[int, int], seed: int = 0, each: int = 2) -> tuple[Tensor, list[Target]]:
    """Pictures of coloured rectangles that do not touch, one colour for each of three classes, padded to one size."""
    maker = torch.Generator().manual_seed(seed)
    canvas = torch.zeros(len(sizes), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    targets = []
    for image, (height, width) in zip(canvas, sizes, strict=True):
        image[:, :height, :width] = 0.1 * torch.randn(3, height, width, generator=maker)
        boxes = torch.zeros(each, 4)
        while (box_iou(boxes, boxes).triu(1) != 0).any():  # NaN at first
            sides = torch.randint(24, 41, (each, 2), generator=maker)
            corners = (torch.rand(each, 2, generator=maker) * (torch.tensor([width, height]) - sides)).floor()
            boxes = torch.cat((corners, corners + sides), dim=1)
        labels = torch.randint(0, 3, (each,), generator=maker)
        masks = torch.zeros(each, *canvas.shape[-2:], dtype=torch.bool)
        for (x, y, right, bottom), label, mask in zip(boxes.int().tolist(), labels, masks, strict=True):
            image[:, y:bottom, x:right] = COLOURS[label][:, None, None]
            mask[y:bottom, x:right] = True
        targets.append({"size": torch.tensor([height, width]), "boxes": boxes, "labels": labels, "masks": masks})
    return canvas, targets


def ap50(found: list[Target], targets: list[Target]) -> float:
    """Average precision at IoU 0.5, the mean over classes: detections in order of score take the targets they fit."""
    values = []
    for label in torch.cat([target["labels"] for target in targets]).unique():
        wanted = [target["boxes"][target["labels"] == label] for target in targets]
        taken = [torch.zeros(len(boxes), dtype=torch.bool) for boxes in wanted]
        ranked = sorted(
            (
                (float(score), number, box)
                for number, image in enumerate(found)
                for score, box, name in zip(image["scores"], image["boxes"], image["labels"], strict=True)
                if name == label
            ),
            key=lambda each: -each[0],
        )
        hits = []
        for _, number, box in ranked:
            overlaps = (
                box_iou(box[None], wanted[number])[0] * ~taken[number] if len(wanted[number]) else box.new_zeros(1)
            )
            hits.append(bool(overlaps.max() >= 0.5))
            if hits[-1]:
                taken[number][overlaps.argmax()] = True
        right = torch.tensor(hits).cumsum(0)
        precision = right / torch.arange(1, len(hits) + 1)
        envelope = precision.flip(0).cummax(0).values.flip(0) if hits else precision
        values.append(float((envelope * torch.tensor(hits)).sum()) / sum(map(len, wanted)))
    return sum(values) / len(values)
