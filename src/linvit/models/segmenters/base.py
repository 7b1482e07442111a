"""What segmenters share: the maps of a padded batch, labels in one tensor, the loss over the pixels that are judged."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.models.dense import IGNORED, DenseModel, Target, sizes_of

if TYPE_CHECKING:
    from linvit.models.backbones import Backbone


class Segmenter(DenseModel):
    """Base of the segmenters: a backbone, and a subclass's neck and head on its maps."""

    task = "segment"

    def __init__(self, backbone: "Backbone", num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_classes = num_classes

    def maps(self, images: Tensor, targets: Sequence[Target] | None) -> list[Tensor]:
        """The backbone's four maps. Targets tell which part of an image is padding."""
        return self.backbone(images, sizes_of(images, targets))

    def labels(self, images: Tensor, targets: Sequence[Target] | None) -> Tensor:
        """The labels of a batch, `(batch, height, width)`: padding is not judged."""
        if targets is None:
            raise LinvitError("a segmenter in training wants targets: give them, or call eval() first")
        height, width = images.shape[-2:]
        rows = [target["labels"] for target in targets]
        for row in rows:
            if row.shape[0] > height or row.shape[1] > width:
                given = f"labels of {row.shape[0]}×{row.shape[1]} pixels for images of {height}×{width}"
                raise LinvitError(f"{given}: resize both alike")
        padded = [F.pad(row, (0, width - row.shape[1], 0, height - row.shape[0]), value=IGNORED) for row in rows]
        return torch.stack(padded).to(images.device, torch.long)


def resize(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps at another height and width."""
    return F.interpolate(maps, size=(size[0], size[1]), mode="bilinear", align_corners=False)


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy at the labels' size, mean over the pixels that are judged; zero where none is."""
    whole = resize(logits.float(), labels.shape[-2:])
    total = F.cross_entropy(whole, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def begin_undecided(classifier: nn.Conv2d) -> None:
    """The small weights that mmsegmentation's classifiers begin with, by which all classes are about as likely."""
    nn.init.normal_(classifier.weight, std=0.01)
    if classifier.bias is not None:
        nn.init.zeros_(classifier.bias)
