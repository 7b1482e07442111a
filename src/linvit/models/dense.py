"""Detectors and segmenters are timm models too: `timm.create_model("faster_rcnn", backbone="deit_tiny_patch16_224")`.

Each is a backbone (any timm model, its maps at strides 4, 8, 16 and 32), a neck and a head. Because they are built by
name and arguments, they convert, save, load and export like every other model. Importing this registers the names;
what builds them is imported when one is asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, distributed, nn

from linvit.errors import LinvitError
from linvit.models.named import TIMMS, add_model, default_cfg

if TYPE_CHECKING:
    from linvit.models.backbones import Backbone

Target = dict[str, Tensor]
PASSED_ON = ("mean", "std", "interpolation", "input_size", "crop_pct")  # what a backbone wants of images
IGNORED = 255  # the label of pixels that are not judged


class DenseModel(nn.Module):
    """Base of detectors and segmenters.

    Images are `(batch, 3, height, width)`, normalised, and padded at the right and the bottom where they differ in
    size; maps of labels and masks are padded with them. A target is a dict of tensors for each image: `size`, best on
    the CPU, is its height and width without padding; `boxes` are
    `(n, 4)` as left, top, right, bottom in pixels, with `labels` `(n,)` and, for models with `masks`, `masks`
    `(n, height, width)`; of a segmenter, `labels` are `(height, width)`, with 255 for pixels that are not judged.
    Labels count classes from 0; a detector keeps its background to itself.

    In training, `model(images, targets)` gives the losses by name, to be summed. In evaluation, `model(images)` gives
    what it sees; targets, if there are any, tell no more than the sizes. A detector gives a dict for each image:
    `boxes`, `scores`, `labels` and perhaps `masks`, best first; a segmenter logits `(batch, classes, height, width)`.
    """

    task: ClassVar[str]
    masks: ClassVar[bool] = False  # whether a detector learns and gives masks
    backbone: "Backbone"
    num_classes: int

    def parts(self) -> dict[str, list[nn.Module]]:
        """What the model consists of, from the image on, for counting and timing by part."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Parameters that are tables rather than weights, which are not decayed."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Any:
        raise NotImplementedError


def sizes_of(images: Tensor, targets: Sequence[Target] | None) -> Tensor | None:
    """Heights and widths of the images without padding, `(batch, 2)` on the images' device; none where nothing is
    padded, so that attention goes without a mask."""
    if targets is None:
        return None
    sizes = torch.stack([target["size"] for target in targets])
    padded = bool((sizes != torch.tensor(images.shape[-2:], device=sizes.device)).any())
    return sizes.to(images.device, non_blocking=True) if padded else None


def per_process(count: Tensor) -> Tensor:
    """The mean of a count over all processes, one at least: what a loss is divided by, so that an object weighs as much
    in whichever process it is learnt."""
    count = count.detach() * 1.0  # not the caller's own, and no whole number
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(count)
        count /= distributed.get_world_size()
    return count.clamp(min=1)


@dataclass(frozen=True)
class Head:
    """A kind of dense model: its task, where its class is, and what has to be installed for it."""

    task: str
    where: str
    extra: str = ""
    masks: bool = False  # whether it learns and gives masks of objects


HEADS: Mapping[str, Head] = {
    "faster_rcnn": Head("detect", "detectors.rcnn:FasterRCNN"),
    "mask_rcnn": Head("detect", "detectors.rcnn:MaskRCNN", masks=True),
    "cascade_mask_rcnn": Head("detect", "detectors.cascade:CascadeMaskRCNN", masks=True),
    "picodet": Head("detect", "detectors.picodet:PicoDet"),
    "semantic_fpn": Head("segment", "segmenters.semantic_fpn:SemanticFPN"),
    "upernet": Head("segment", "segmenters.upernet:UPerNet", "transformers"),
    "mask2former": Head("segment", "segmenters.mask2former:Mask2Former", "transformers"),
}


def build(
    name: str,
    *,
    backbone: str = "",
    pyramid: str = "auto",
    pyramid_args: Mapping[str, Any] | None = None,
    backbone_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    num_classes: int = 80,
    **args: Any,
) -> nn.Module:
    """A dense model on a backbone. `pyramid` makes maps of four strides from a plain ViT, `simple` or `adapter`, by
    `pyramid_args`; a pyramid has its `own`. `backbone_args` are timm's; `pretrained` fetches the backbone's weights.
    Other arguments are the head's. An adapter is as in its authors' detectors or, under a segmenter, their segmenters.
    """
    from linvit.models.backbones import make_backbone

    if not backbone:
        raise LinvitError(f"{name} wants a backbone: give backbone='…', the name of a timm model")
    head = HEADS[name]
    module, _, cls = head.where.partition(":")
    try:
        kind = getattr(import_module(f"linvit.models.{module}"), cls)
    except ImportError as error:
        if head.extra and (error.name or "").split(".")[0] == head.extra:
            raise LinvitError(f"{name} comes from {head.extra}: pip install linvit[{head.extra}]") from None
        raise
    if pyramid == "adapter" and head.task == "segment":
        pyramid_args = {"every_stage": True, **(pyramid_args or {})}
    trunk = make_backbone(
        backbone, pyramid=pyramid, pretrained=pretrained, pyramid_args=pyramid_args, **dict(backbone_args or {})
    )
    model = kind(trunk, num_classes, **{key: value for key, value in args.items() if key not in TIMMS})
    known = getattr(trunk.trunk, "pretrained_cfg", None) or {}
    passed = {key: known[key] for key in PASSED_ON if key in known}
    model.pretrained_cfg = model.default_cfg = {**default_cfg(**passed), "architecture": name}
    model.pretrained_cfg["num_classes"] = num_classes
    return model


for name in HEADS:
    add_model(name, build, default_cfg(num_classes=80, input_size=(3, 512, 512)), fetches=True)
