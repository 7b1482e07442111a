"""A timm model as a trunk: built so that it takes images of any size, surveyed, and without what no map needs.

What timm notes of a model's features (strides, sizes that are taken) is not always so. Every trunk is therefore built
on the meta device first, where it weighs nothing, and tried: which maps it gives at which strides, what the sides of
an image have to be a multiple of, and which parameters no map depends on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models.eva import Eva
from timm.models.mvitv2 import MultiScaleVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.conversion.convert import convert, find_hosts, own_size
from linvit.conversion.dry_run import channels_of
from linvit.conversion.host import Host
from linvit.conversion.opening import create_model
from linvit.conversion.rebuilding import inner, parameters
from linvit.errors import LinvitError

STRIDES = (4, 8, 16, 32)
# What lets a family take any size. Swin's windows keep their size and shift in stages that were small when it was
# trained, as in its authors' detectors.
ANY_SIZE: Mapping[str, Any] = {"dynamic_img_size": True, "strict_img_size": False, "always_partition": True}
MULTIPLES = (1, 2, 4, 7, 8, 14, 16, 32, 64, 128, 224, 256, 384)  # 224, 256: windows of 7 and 8 tokens at stride 32
SMALLEST = 96  # pixels, of the sizes that are tried


@dataclass(frozen=True)
class Layout:
    """The maps of a trunk that a backbone reads, from the finest on, and what the trunk asks of images."""

    indices: tuple[int, ...]  # as forward_intermediates counts them
    channels: tuple[int, ...]
    strides: tuple[int, ...]  # one only in a plain ViT
    multiple: int  # what height and width have to be a multiple of
    size: tuple[int, int] | None  # the only size that is taken, where there is one
    unused: frozenset[str]  # parameters that these maps do not depend on

    @property
    def plain(self) -> bool:
        return len(self.strides) == 1


SURVEYED: dict[str, tuple[dict[str, Any], Layout]] = {}  # by name and arguments: a model is often built again


def build_trunk(name: str, pretrained: bool, args: Mapping[str, Any]) -> tuple[nn.Module, Layout]:
    """A timm model without its classifier, for images of any size as far as it can be, and its layout."""
    key = f"{name} {sorted(args.items())}"
    if key not in SURVEYED:
        SURVEYED[key] = survey(name, args)
    taken, layout = SURVEYED[key]
    trunk = create_model(name, pretrained, dict(taken), "backbone", "pretrained=False")
    free_sizes(trunk)
    drop_parameters(trunk, layout.unused)
    trunk.num_classes = 0  # type: ignore[assignment]
    return trunk, layout


def survey(name: str, args: Mapping[str, Any]) -> tuple[dict[str, Any], Layout]:
    """The arguments that let a trunk take any size, and what it then is like, tried on the meta device."""
    with torch.device("meta"):
        twin = create_model(name, False, dict(args), "backbone", "")
        if hasattr(twin, "forward_intermediates"):
            known = parameters(twin)
            more = {key: value for key, value in ANY_SIZE.items() if key in known}
        else:
            more = {"features_only": True}
        taken = {**more, **args}
        try:
            twin = create_model(name, False, dict(taken), "backbone", "") if more else twin
        except LinvitError as error:
            raise LinvitError(f"{name} cannot be a backbone: timm has no way to its maps") from error
        free_sizes(twin)
        return taken, try_sizes(name, twin, to_2tuple(args.get("img_size") or own_size(inner(twin))))


def free_sizes(trunk: nn.Module) -> None:
    """timm's MViTv2 has relative positions for one size. As a softmax host it resizes them, as its authors do."""
    hosts = find_hosts(trunk)
    if isinstance(trunk, MultiScaleVit) and not any(isinstance(module, Host) for _, module in hosts):
        convert(trunk, "softmax")


def maps_of(trunk: Any, images: Tensor, indices: Sequence[int] | None = None, mask: Tensor | None = None) -> Any:
    """The maps `(batch, channels, height, width)` of a trunk, all or those with these indices. `mask`, a key mask, is
    for those that take one."""
    if not hasattr(trunk, "forward_intermediates"):
        maps = trunk(images)
        return maps if indices is None else [maps[index] for index in indices]
    given = {} if mask is None else {"attn_mask": mask}
    wanted = None if indices is None else list(indices)
    return trunk.forward_intermediates(images, indices=wanted, intermediates_only=True, **given)


def try_sizes(name: str, twin: nn.Module, own: tuple[int, int]) -> Layout:
    """The layout of a trunk that is on the meta device; `own` is the size that it is built for."""
    channels = channels_of(inner(twin))

    def shapes(size: tuple[int, int]) -> list[tuple[int, ...]]:
        with torch.no_grad():
            return [tuple(found.shape[1:]) for found in maps_of(twin, torch.empty(2, channels, *size))]

    try:
        found = shapes(own)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise LinvitError(f"{name} gives no maps of {own[0]}×{own[1]} pixels: {error}") from error
    exact = [own[0] / height for _, height, _ in found]
    at = {int(stride): index for index, stride in enumerate(exact) if stride == int(stride)}  # the last of each stride
    strides = tuple(at) if len(at) == 1 else choose_strides(name, sorted(exact), at)
    indices = tuple(at[stride] for stride in strides)
    multiple = next((m for m in MULTIPLES if takes(shapes, m, indices, strides)), None)
    with torch.enable_grad():
        maps = maps_of(twin.train(), torch.empty(2, channels, *own), indices)
        torch.stack([found.sum() for found in maps]).sum().backward()
    return Layout(
        indices,
        tuple(found[index][0] for index in indices),
        strides,
        multiple or 1,
        None if multiple else own,
        frozenset(key for key, parameter in twin.named_parameters() if parameter.grad is None),
    )


def choose_strides(name: str, exact: Sequence[float], at: Mapping[int, int]) -> tuple[int, ...]:
    """Those of the four maps; others than 4, 8, 16 and 32 are resized where each is less than twice its own (fair
    pyramids on patches of 7 pixels)."""
    for first in range(STRIDES[0], STRIDES[1]):
        strides = tuple(first * stride // STRIDES[0] for stride in STRIDES)
        if all(stride in at for stride in strides):
            return strides
    there = ", ".join(f"{stride:g}" for stride in dict.fromkeys(exact))
    raise LinvitError(f"{name} cannot be a backbone: its maps are at strides {there}, and 4, 8, 16, 32 are needed")


def takes(shapes: Any, multiple: int, indices: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a trunk takes images whose sides are multiples of this, and its maps cover them."""
    times = -(-SMALLEST // multiple) | 1  # odd
    height, width = times * multiple, (times + 2) * multiple
    try:
        found = shapes((height, width))
    except (AssertionError, RuntimeError, ValueError, LinvitError):
        return False
    wanted = [(-(-height // stride), -(-width // stride)) for stride in strides]
    return [found[index][1:] for index in indices] == wanted


def drop_parameters(trunk: nn.Module, unused: frozenset[str]) -> None:
    """Take out what no map depends on: the classifier's layers, the final norm, a class token that only they read."""
    for name, module in list(trunk.named_modules()):
        inside = {f"{name}.{key}" for key, _ in module.named_parameters()}
        if name and inside and inside <= unused:
            owner, _, leaf = name.rpartition(".")
            setattr(trunk.get_submodule(owner), leaf, nn.Identity())
            unused -= inside
    for name in unused:
        owner, _, leaf = name.rpartition(".")
        setattr(trunk.get_submodule(owner), leaf, None)


def drop_prefix(trunk: Any) -> None:
    """Take the class, distillation and register tokens out of a ViT, and their places out of its position table."""
    count = trunk.num_prefix_tokens
    if getattr(trunk, "pos_embed", None) is not None and not trunk.no_embed_class:
        trunk.pos_embed = nn.Parameter(trunk.pos_embed.detach()[:, count:].clone())
    for token in ("cls_token", "reg_token", "dist_token"):
        if getattr(trunk, token, None) is not None:
            setattr(trunk, token, None)
    if isinstance(trunk, VisionTransformer):
        trunk.__class__ = VisionTransformer  # DeiT's distilled class would look for its tokens
    for module in trunk.modules():
        for counter in ("num_prefix_tokens", "num_reg_tokens"):
            if hasattr(module, counter):
                setattr(module, counter, 0)
        if getattr(module, "grids", None) is not None:
            module.grids.prefix = 0
    trunk.has_class_token = False


def takes_masks(trunk: nn.Module) -> bool:
    """Whether key masks reach all of its attention: in ViTs and EVAs, where their mechanisms take them."""
    mechanisms = (module.mechanism for module in trunk.modules() if isinstance(module, Host))
    return isinstance(trunk, VisionTransformer | Eva) and all(m.capabilities.key_mask for m in mechanisms)
