"""SemanticFPN: a feature pyramid network and Panoptic FPN's semantic head, after mmsegmentation's `FPNHead`.

Each level goes through convolutions that double its resolution one by one until all are at stride 4, where they are
summed and classified. Levels are resized to the very size of the finer map, so any image size fits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from linvit.models.dense import Target
from linvit.models.fpn import by_level, feature_pyramid
from linvit.models.segmenters.base import Segmenter, begin_undecided, pixel_loss, resize

if TYPE_CHECKING:
    from linvit.models.backbones import Backbone


class SemanticFPN(Segmenter):
    """`channels` is the width of the FPN, `head_channels` that of the head."""

    def __init__(
        self,
        backbone: "Backbone",
        num_classes: int,
        *,
        channels: int = 256,
        head_channels: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(backbone, num_classes)
        self.neck = feature_pyramid(backbone.channels, channels)
        self.head = SemanticHead(len(backbone.channels), channels, head_channels, num_classes, dropout)

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"backbone": [self.backbone], "neck": [self.neck], "head": [self.head]}

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Tensor | dict[str, Tensor]:
        pyramid = self.neck(by_level(self.maps(images, targets)))
        logits = self.head(list(pyramid.values()))
        if self.training:
            return {"segmentation": pixel_loss(logits, self.labels(images, targets))}
        return resize(logits.float(), images.shape[-2:])


class SemanticHead(nn.Module):
    """From maps of one width, finest first, to logits at the finest."""

    def __init__(self, levels: int, channels: int, width: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList(Conv2dNormActivation(width if step else channels, width, 3) for step in range(max(1, level)))
            for level in range(levels)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        begin_undecided(self.classifier)

    def forward(self, maps: list[Tensor]) -> Tensor:
        at_finest = []
        levels: Any = self.levels
        for level, (picture, convolutions) in enumerate(zip(maps, levels, strict=True)):
            for step, convolution in enumerate(convolutions, start=1):
                picture = convolution(picture)
                if level:
                    picture = resize(picture, maps[level - step].shape[-2:])
            at_finest.append(picture)
        return self.classifier(self.dropout(sum(at_finest)))
