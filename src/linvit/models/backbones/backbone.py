"""Any timm model as a backbone: four maps at strides 4, 8, 16 and 32, from images of any size.

The whole timm model is the trunk, so its parameters keep their names, its attention can be converted, and a
classifier's weights load. A pyramid has its `own` maps. From a plain ViT, ViTDet's `simple` pyramid makes them, or the
ViT-`adapter`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from timm.models.efficientvit_mit import EfficientVit, EfficientVitLarge
from torch import Tensor, nn

from linvit.errors import LinvitError, unknown
from linvit.models.backbones.adapter import Adapter
from linvit.models.backbones.loading import load_trunk
from linvit.models.backbones.maps import crop_to, inside, pad_to, places, to_stride
from linvit.models.backbones.simple_pyramid import SimplePyramid
from linvit.models.backbones.trunks import STRIDES, Layout, build_trunk, drop_prefix, maps_of, takes_masks

PYRAMIDS = ("auto", "own", "simple", "adapter")


def make_backbone(
    name: str,
    pyramid: str = "auto",
    pretrained: bool = False,
    pyramid_args: Mapping[str, Any] | None = None,
    **args: Any,
) -> "Backbone":
    """The timm model of this name as a backbone. `pyramid` is how it comes to four maps: a pyramid by its `own`, which
    is what `auto` is for it, a plain ViT by the `simple` pyramid, which is its `auto`, or the `adapter`; `pyramid_args`
    go to these two. Other arguments are timm's."""
    if pyramid not in PYRAMIDS:
        raise unknown("pyramid", pyramid, PYRAMIDS)
    trunk, layout = build_trunk(name, pretrained, args)
    if pyramid == "auto":
        pyramid = "simple" if layout.plain else "own"
    if pyramid == "own" and layout.plain:
        raise LinvitError(
            f"{name} has maps at stride {layout.strides[0]} only: give pyramid='simple' or pyramid='adapter'"
        )
    if pyramid != "own" and not layout.plain:
        raise LinvitError(f"{name} has a pyramid of its own: leave out pyramid='{pyramid}'")
    if pyramid == "own" and pyramid_args:
        raise LinvitError(f"{name} has a pyramid of its own, which takes no arguments: leave out pyramid_args")
    top: SimplePyramid | Adapter | None = None
    if pyramid == "simple":
        top = SimplePyramid(layout.channels[0], layout.strides[0], **dict(pyramid_args or {}))
    elif pyramid == "adapter":
        top = Adapter(name, trunk, layout.strides[0], **dict(pyramid_args or {}))
        drop_prefix(trunk)
    return Backbone(trunk, layout, top)


class Backbone(nn.Module):
    """Images in, their four maps out, with `channels` and `strides`. Built by `make_backbone`."""

    strides = STRIDES

    def __init__(self, trunk: nn.Module, layout: Layout, pyramid: SimplePyramid | Adapter | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.pyramid = pyramid
        self.layout = layout
        self.channels: tuple[int, ...] = layout.channels if pyramid is None else pyramid.channels

    @property
    def masks_padding(self) -> bool:
        """Whether the trunk's attention leaves out what `sizes` call padding. Elsewhere it is seen as zeros."""
        return self.layout.plain and takes_masks(self.trunk)

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        """Maps `(batch, channels, ceil(height / stride), ceil(width / stride))`.

        `sizes`, `(batch, 2)`, are heights and widths without padding; leave them out where nothing is padded, which is
        faster. Positions are those of the padded image, as in ViTDet.
        """
        size = (images.shape[-2], images.shape[-1])
        images = pad_to(images, self.padded(size))
        if sizes is not None:
            sizes = sizes.to(images.device)
        if self.pyramid is None:
            maps = maps_of(self.trunk, images, self.layout.indices)
            levels = zip(maps, self.layout.strides, STRIDES, strict=True)
            return [to_stride(crop_to(found, places(size, have)), have, want, size) for found, have, want in levels]
        masked = sizes if self.masks_padding else None
        mask = None if masked is None else self.key_mask(masked, (images.shape[-2], images.shape[-1]))
        if isinstance(self.pyramid, Adapter):
            return self.pyramid(self.trunk, images, size, mask)
        (last,) = maps_of(self.trunk, images, self.layout.indices, mask)
        return self.pyramid(crop_to(last, places(size, self.layout.strides[0])), size, masked)

    def padded(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size that the trunk takes images of this size in."""
        only, multiple = self.layout.size, self.layout.multiple
        if only is None:
            return -(-size[0] // multiple) * multiple, -(-size[1] // multiple) * multiple
        if size[0] > only[0] or size[1] > only[1]:
            raise LinvitError(
                f"this {type(self.trunk).__name__} takes images up to {only[0]}×{only[1]} pixels, got "
                f"{size[0]}×{size[1]}: build it with a larger img_size"
            )
        return only

    def key_mask(self, sizes: Tensor, size: tuple[int, int]) -> Tensor:
        """`(batch, 1, 1, tokens)`, true for class and register tokens and for patches that show some of their image."""
        stride = self.layout.strides[0]
        patches = inside(sizes, stride, places(size, stride)).flatten(2)[:, None]
        prefix: Any = self.trunk.num_prefix_tokens
        return torch.cat((patches.new_ones(len(sizes), 1, 1, prefix), patches), dim=-1)

    def load_trunk(self, model: nn.Module) -> None:
        """Take the weights, and the mechanisms of converted layers, from a classifier of the same architecture. Tables
        of positions are resampled where they are of another size."""
        load_trunk(self.trunk, model, self.layout.unused)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Forget activations of the trunk's blocks and compute them anew in the backward pass."""
        trunk: Any = self.trunk
        if not hasattr(trunk, "set_grad_checkpointing") or isinstance(trunk, EfficientVit | EfficientVitLarge):
            raise LinvitError(f"{type(trunk).__name__} cannot recompute its blocks' activations")
        trunk.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters that are tables rather than weights, which are not decayed."""
        own: set[str] = getattr(self.trunk, "no_weight_decay", set)()
        top = {"pyramid.level_embed"} if isinstance(self.pyramid, Adapter) else set()
        return {f"trunk.{name}" for name in own} | top
