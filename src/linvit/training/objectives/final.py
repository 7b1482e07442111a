"""The final features of a backbone, and an objective that brings a converted one back to its original by them.

What a backbone is used for reads its last features: those of the patches, and one of the whole image, the class token
or what the model pools; of a pyramid also the maps of the stages before. Each is compared by direction and by distance:

    loss = mean over patches, image and maps of (1 − cosine) + relative error

What reads the maps, a segmenter's neck say, may be asked too: a `reader` takes all of a model's maps, from the finest,
and what it makes of them is compared in their place.

No label is read. The outputs of the blocks can be matched beside it, with a weight. Matching those or the layers alone
leaves what a reader sees to chance; the final features are what all of it is for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.conversion.dry_run import image_part, without_head
from linvit.conversion.grids import prefix_tokens, stem
from linvit.conversion.rebuilding import hugging
from linvit.errors import LinvitError
from linvit.training.contract import Batch, Objective, blocks_around_hosts, images_of
from linvit.training.objectives.alignment import hosts_to_align
from linvit.training.objectives.distillation import Distance
from linvit.training.objectives.teacher import Activations, Teacher

Reader = Callable[[list[Tensor]], Sequence[Tensor]]  # from maps (batch, channels, height, width) to such maps


class Features(NamedTuple):
    """Of the patches `(batch, patches, channels)`, of the image `(batch, channels)`, and of the places in a pyramid's
    earlier maps, or in those that a reader makes, as of patches."""

    patches: Tensor
    image: Tensor
    maps: tuple[Tensor, ...] = ()

    def pairs(self, other: "Features") -> list[tuple[Tensor, Tensor]]:
        """What is compared with what: patches, image, maps."""
        return list(zip((self.patches, self.image, *self.maps), (other.patches, other.image, *other.maps), strict=True))


def final_features(model: Any, images: Tensor, reader: Reader | None = None) -> Features:
    """What a backbone gives: the features before the classifier, if there is one. Class and register tokens are no
    patches; the image's feature is what the model itself pools, or without that the class token or the mean."""
    pooled: Any
    maps: list[Tensor] = []
    if hugging(model):
        part: Any = image_part(model)
        found = (without_head(model) if part is model else part)(images)
        tokens, pooled = getattr(found, "last_hidden_state", None), getattr(found, "pooler_output", None)
        maps = list(getattr(found, "fpn_hidden_states", None) or ())  # what SAM 2's decoder reads
        prefix = next((prefix_tokens(owner) for owner in part.modules() if stem(owner) is not None), 0)
    elif hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        if is_pyramid(model) or (reader is not None and hasattr(model, "forward_intermediates")):
            tokens, maps = model.forward_intermediates(images)
            maps = maps if reader is not None else maps[:-1]
        else:
            tokens = model.forward_features(images)
        pooled, prefix = model.forward_head(tokens, pre_logits=True), first_tokens(model)
    else:
        raise no_features(model)
    if not isinstance(tokens, Tensor) or tokens.ndim not in (3, 4):
        raise no_features(model)
    if tokens.ndim == 4:
        width, prefix = width_of(model), 0
        last = tokens.shape[-1] == width and (tokens.shape[1] != width or getattr(model, "output_fmt", "") == "NHWC")
        tokens = tokens.flatten(1, 2) if last else tokens.flatten(2).transpose(1, 2)
    patches = tokens[:, prefix:]
    if not patches.shape[1]:  # PiT gives its class token alone
        raise no_features(model)
    if isinstance(pooled, tuple | list):  # a head for the labels and one for a teacher
        pooled = torch.stack([part for part in pooled if isinstance(part, Tensor)]).mean(0)
    if not isinstance(pooled, Tensor) or pooled.ndim != 2:
        pooled = tokens[:, 0] if prefix else patches.mean(1)
    if reader is not None:
        if not maps:
            raise LinvitError(f"{type(model).__name__} gives no maps for a reader: take a backbone of timm that does")
        maps = list(reader(maps))
    return Features(patches, pooled, tuple(found.flatten(2).transpose(1, 2) for found in maps))


def width_of(model: Any) -> int | None:
    """The channels of the last map, where a model may put them last: timm says it, of Hugging Face's SAM 2 does so."""
    config = getattr(model, "config", None)
    stages = getattr(getattr(config, "backbone_config", config), "embed_dim_per_stage", None)
    return stages[-1] if stages else getattr(model, "num_features", None)


def is_pyramid(model: nn.Module) -> bool:
    """Whether a timm model has maps of several strides, and gives them."""
    known: Any = getattr(model, "feature_info", None)
    strides = {stage["reduction"] for stage in getattr(known, "info", known) or ()}
    return len(strides) > 1 and hasattr(model, "forward_intermediates")


def first_tokens(model: nn.Module) -> int:
    """How many tokens of a timm model come before its patches; some families have a class token and do not count it."""
    counted = getattr(model, "num_prefix_tokens", None)
    tokens = (token.shape[1] for name, token in model.named_parameters(recurse=False) if name.startswith("cls_token"))
    return next(tokens, 0) if counted is None else int(counted)


def no_features(model: nn.Module) -> LinvitError:
    kind = type(model).__name__
    return LinvitError(f"{kind} gives no features of patches: take a ViT or another backbone of timm or transformers")


def teacher_features(teacher: Teacher, images: Tensor, reader: Reader | None = None) -> Features:
    """What a teacher gives for images that are normalised for the student."""
    return teacher.output(images, partial(final_features, teacher.model, reader=reader))


def cosines(ours: Tensor, theirs: Tensor) -> Tensor:
    """The cosine of each pair of features; a mean over an image's patches."""
    if ours.shape != theirs.shape:
        shapes = f"{tuple(theirs.shape[1:])}, the student's {tuple(ours.shape[1:])}"
        raise LinvitError(f"the teacher's features are {shapes}: choose the original, or one of its shape")
    found = F.cosine_similarity(ours.float(), theirs.float(), dim=-1)
    return found.mean(1) if found.ndim == 2 else found


class FinalAlignment(Objective):
    """The objective. `blocks` is the weight of the distance between the outputs of the blocks around the attention
    layers, beside the final features; 0 leaves it out."""

    teacher: Teacher
    distance: Distance

    def __init__(
        self, teacher: Teacher, student: nn.Module, *, blocks: float = 0.0, reader: Reader | None = None
    ) -> None:
        self.teacher, self.distance, self.weight, self.reader = teacher, Distance(), blocks, reader
        self.blocks: list[str] = []
        if blocks:
            hosts_to_align(teacher.model, student)
            self.blocks = blocks_around_hosts(student)
            self.activations = [Activations(model, outputs=self.blocks) for model in (student, teacher.model)]

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images = images_of(batch)[0]
        for recorded in self.activations:
            recorded.record()
        wanted = teacher_features(self.teacher, images, self.reader)
        given = final_features(model, images, self.reader)
        pairs = given.pairs(wanted)
        alike = torch.stack([cosines(one, other).mean() for one, other in pairs])
        apart = torch.stack([self.distance(one, other) for one, other in pairs])
        loss, entries = (1 - alike + apart).mean(), {"distance": apart.mean().detach()}
        entries |= {"patch_cosine": alike[0].detach(), "class_cosine": alike[1].detach()}
        if self.blocks:
            seen, shown = (recorded.take()[1] for recorded in self.activations)
            blocks = torch.stack([self.distance(seen[name], shown[name]) for name in self.blocks]).mean()
            loss, entries["features"] = loss + self.weight * blocks, blocks.detach()
        return {"loss": loss, **entries}
