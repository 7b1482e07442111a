"""UPerNet, by transformers' heads: pooled context on the last map, a feature pyramid, and an auxiliary FCN head that
helps the third map learn in training.

Widths, pooling, dropout and the auxiliary weight are those of mmsegmentation's configs for transformers. Dropout is
added here, as transformers left it out; no name of a weight changes by it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from linvit.errors import LinvitError
from linvit.models.dense import Target
from linvit.models.segmenters.base import Segmenter, begin_undecided, pixel_loss, resize

if TYPE_CHECKING:
    from linvit.models.backbones import Backbone

AUXILIARY_MAP = 2  # of stride 16
AUXILIARY_WEIGHT = 0.4


class UPerNet(Segmenter):
    """`channels` is the width of the head, `auxiliary_channels` that of the auxiliary one."""

    def __init__(
        self,
        backbone: "Backbone",
        num_classes: int,
        *,
        channels: int = 512,
        auxiliary_channels: int = 256,
        pools: Sequence[int] = (1, 2, 3, 6),
        dropout: float = 0.1,
    ) -> None:
        super().__init__(backbone, num_classes)
        settings: dict[str, Any] = {
            "num_labels": num_classes,
            "hidden_size": channels,
            "auxiliary_channels": auxiliary_channels,
            "pool_scales": tuple(pools),
        }
        config = UperNetConfig(**settings)
        maps = list(backbone.channels)
        self.head = UperNetHead(config, maps)
        self.auxiliary = UperNetFCNHead(config, maps, in_index=AUXILIARY_MAP)
        convolutions: Any = self.auxiliary.convs
        for block in (self.head.fpn_bottleneck, convolutions[-1]):
            block.activation = nn.Sequential(nn.ReLU(), nn.Dropout2d(dropout))
        for head in (self.head, self.auxiliary):
            begin_undecided(head.classifier)

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"backbone": [self.backbone], "head": [self.head, self.auxiliary]}

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Tensor | dict[str, Tensor]:
        if self.training and len(images) == 1 and not any(isinstance(m, nn.SyncBatchNorm) for m in self.head.modules()):
            raise LinvitError(
                "UPerNet's batch norm sees one pooled pixel per image: train on 2 images or more at a time"
            )
        maps = self.maps(images, targets)
        logits = self.head(maps)
        if not self.training:
            return resize(logits.float(), images.shape[-2:])
        labels = self.labels(images, targets)
        auxiliary = AUXILIARY_WEIGHT * pixel_loss(self.auxiliary(maps), labels)
        return {"segmentation": pixel_loss(logits, labels), "auxiliary": auxiliary}
