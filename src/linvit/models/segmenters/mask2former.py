"""Mask2Former, by transformers' pixel decoder, masked-attention decoder and loss, on any backbone.

Queries each say a class, or none, and where it is. For semantic segmentation there is one true mask for each class that
an image shows. Every layer's answer is matched with them and learns; the last one counts. As in the original, no mask
holds the pixels that are not judged.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Mask2FormerConfig
from transformers.models.mask2former.modeling_mask2former import (
    Mask2FormerLoss,
    Mask2FormerPixelDecoder,
    Mask2FormerPixelDecoderEncoderLayer,
    Mask2FormerPreTrainedModel,
    Mask2FormerTransformerModule,
)

from linvit.attention.precision import outside_autocast
from linvit.models.dense import IGNORED, Target, per_process
from linvit.models.segmenters.base import Segmenter, resize

if TYPE_CHECKING:
    from linvit.models.backbones import Backbone

WEIGHTS = {"class": 2.0, "mask": 5.0, "dice": 5.0}


class Mask2Former(Segmenter):
    """`channels` is the width of both decoders, a multiple of 32; the loss reads masks at so many `points`.

    In evaluation the logits are the logarithms of Mask2Former's scores, the sum over queries of how likely the class is
    times how likely the mask has the pixel. So softmax gives each class's share of the score.
    """

    def __init__(
        self,
        backbone: "Backbone",
        num_classes: int,
        *,
        channels: int = 256,
        queries: int = 100,
        pixel_layers: int = 6,
        layers: int = 9,
        heads: int = 8,
        pixel_feedforward: int = 1024,
        feedforward: int = 2048,
        points: int = 12544,
    ) -> None:
        super().__init__(backbone, num_classes)
        settings: dict[str, Any] = {
            "num_labels": num_classes,
            **dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), channels),
            "num_queries": queries,
            "encoder_layers": pixel_layers,
            "decoder_layers": layers + 1,  # transformers counts the answer before the first layer
            "num_attention_heads": heads,
            "encoder_feedforward_dim": pixel_feedforward,
            "dim_feedforward": feedforward,
            "train_num_points": points,
            **{f"{kind}_weight": weight for kind, weight in WEIGHTS.items()},
        }
        self.decoders = Decoders(Mask2FormerConfig(**settings), backbone.channels, num_classes)

    def parts(self) -> dict[str, list[nn.Module]]:
        inside = self.decoders
        return {
            "backbone": [self.backbone],
            "neck": [inside.pixel_decoder],
            "head": [inside.query_decoder, inside.classifier],
        }

    def no_weight_decay(self) -> set[str]:
        """Queries and level embeddings beside the backbone's tables, as in the original."""
        queries = {"queries_features.weight", "queries_embedder.weight", "level_embed.weight"}
        own = {f"decoders.query_decoder.{name}" for name in queries} | {"decoders.pixel_decoder.level_embed"}
        return super().no_weight_decay() | own

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Tensor | dict[str, Tensor]:
        classes, masks = self.decoders(self.maps(images, targets))
        with outside_autocast(images.device):
            if self.training:
                return self.decoders.losses(classes, masks, self.labels(images, targets))
            chances = classes[-1].float().softmax(-1)[..., :-1]
            places = resize(masks[-1].float(), images.shape[-2:]).sigmoid()
            scores = torch.einsum("bqc,bqhw->bchw", chances, places)
            return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()


class Decoders(Mask2FormerPreTrainedModel):
    """All behind the backbone. They begin with the weights of the original code: transformers has those of the
    attention layers, and small normal ones elsewhere, as it expects to be loaded with trained ones."""

    def __init__(self, config: Mask2FormerConfig, channels: Sequence[int], num_classes: int) -> None:
        super().__init__(config)
        self.pixel_decoder = Mask2FormerPixelDecoder(config, list(channels))
        self.query_decoder = Mask2FormerTransformerModule(config.feature_size, config)
        self.classifier = nn.Linear(config.hidden_dim, num_classes + 1)
        self.criterion = Mask2FormerLoss(config, {})
        self.post_init()
        self.begin_as_released()

    def begin_as_released(self) -> None:
        pixels, queries = self.pixel_decoder, self.query_decoder
        for tensor in (queries.queries_features.weight, queries.queries_embedder.weight, queries.level_embed.weight):
            nn.init.normal_(tensor)
        nn.init.normal_(pixels.level_embed)
        for module in pixels.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
            elif isinstance(module, Mask2FormerPixelDecoderEncoderLayer):
                nn.init.xavier_uniform_(module.fc1.weight)
                nn.init.xavier_uniform_(module.fc2.weight)
        for module in (*queries.decoder.mask_predictor.modules(), self.classifier):
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The logits of each layer's classes, `(batch, queries, classes + 1)`, and of its masks at stride 4."""
        own = (
            self.pixel_decoder.level_embed.dtype
        )  # positions are made in the maps' dtype, which autocast may have lowered
        pixels = self.pixel_decoder([each.to(torch.promote_types(each.dtype, own)) for each in maps])
        answers = self.query_decoder(pixels.multi_scale_features, pixels.mask_features)
        classes = [self.classifier(states.transpose(0, 1)) for states in answers.intermediate_hidden_states]
        return classes, answers.masks_queries_logits

    def losses(self, classes: Sequence[Tensor], masks: Sequence[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """The losses of all layers, by kind. An image without a judged pixel adds nothing."""
        shown = [present(row) for row in labels]
        truths = [(row == these[:, None, None]).float() for row, these in zip(labels, shown, strict=True)]
        count: Any = per_process(torch.tensor(sum(len(these) for these in shown), device=labels.device))
        judged = [image for image, these in enumerate(shown) if len(these)]
        found: dict[str, list[Tensor]] = {kind: [] for kind in WEIGHTS}
        for said, drawn in zip(classes, masks, strict=True):
            said, drawn = said.float(), drawn.float()
            pairs = self.criterion.matcher(drawn, said, truths, shown)
            of_masks = self.criterion.loss_masks(drawn, truths, pairs, count)
            found["mask"].append(of_masks["loss_mask"])
            found["dice"].append(of_masks["loss_dice"])
            chosen: list[Any] = [[rows[image] for image in judged] for rows in (shown, pairs)]
            of_classes = self.criterion.loss_labels(said[judged], *chosen)["loss_cross_entropy"] if judged else None
            found["class"].append(said.sum() * 0 if of_classes is None else of_classes)
        return {kind: weight * torch.stack(found[kind]).sum() for kind, weight in WEIGHTS.items()}


def present(labels: Tensor) -> Tensor:
    """The classes that an image shows."""
    values = labels.unique()
    return values[values != IGNORED]
