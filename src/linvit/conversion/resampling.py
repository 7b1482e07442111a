"""Another patch size or window size with the weights kept, before or after conversion. MixA runs DeiT on patches of 14
pixels and Swin on windows of 14 tokens, and starts both from the usual weights.

The patch kernel is resampled by the pseudo-inverse of image resizing (FlexiViT): the new kernel answers a resized patch
as nearly as can be like the old one answers the patch itself. Resizing the kernel as a picture would change its scale
and blur it. Position tables are interpolated bicubically, with antialiasing. timm has both.
"""

import copy
import inspect
import warnings
from typing import Any

from timm.layers import resample_abs_pos_embed, to_2tuple
from torch import nn

from linvit.errors import LinvitError, reason


def resample_patches(model: nn.Module, patch_size: int, size: int | tuple[int, int] | None = None) -> None:
    """Give a ViT, EVA or Swin another patch size, in place. The image size stays unless told."""
    if not hasattr(getattr(model, "patch_embed", None), "set_input_size"):
        raise LinvitError(f"{type(model).__name__} has no patch embedding that can be resampled")
    if patch_size < 1:
        raise LinvitError(f"the patch size must be at least 1, got {patch_size}")
    height, width = pixels = new_size(model, size)
    padded = getattr(model.patch_embed, "dynamic_img_pad", False)
    if not padded and (height % patch_size or width % patch_size):
        raise LinvitError(f"{height}×{width} pixels cannot be cut into patches of {patch_size}: give another size")
    resize(model, img_size=pixels, patch_size=to_2tuple(patch_size))


def resample_windows(model: nn.Module, window_size: int, size: int | tuple[int, int] | None = None) -> None:
    """Give a Swin another window size, in place; its relative bias is interpolated, where it has one.

    A stage with fewer tokens than that a side has one window of the whole picture, as timm builds it.
    """
    if "window_size" not in inspect.signature(getattr(model, "set_input_size", lambda: None)).parameters:
        raise LinvitError(f"{type(model).__name__} has no windows that can be resized")
    if window_size < 1:
        raise LinvitError(f"the window size must be at least 1, got {window_size}")
    resize(model, img_size=new_size(model, size), window_size=to_2tuple(window_size))


def resample(
    model: Any,
    *,
    size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    window_size: int | None = None,
) -> None:
    """Resample what has a size, where that is asked for or the model fixes its image size."""
    if window_size is not None:
        resample_windows(model, window_size, size)
    if patch_size is not None or (size is not None and hasattr(model, "set_input_size")):
        resample_patches(model, patch_size or model.patch_embed.patch_size[0], size)


def new_size(model: Any, size: int | tuple[int, int] | None) -> tuple[int, int]:
    """The size asked for, else the one the model is built for."""
    if size is not None:
        return to_2tuple(size)
    built = getattr(model.patch_embed, "img_size", None)
    return tuple(built) if built is not None else tuple(model.pretrained_cfg["input_size"][-2:])


def resize(model: Any, **sizes: Any) -> None:
    """timm's set_input_size; Swin's would pick its windows anew where they are not given."""
    takes = inspect.signature(model.set_input_size).parameters
    if "window_size" in takes and "window_size" not in sizes:
        sizes["window_size"] = max(tuple(block.window_size) for layer in model.layers for block in layer.blocks)
    grid, table = model.patch_embed.grid_size, getattr(model, "pos_embed", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="timm.layers.interpolate")  # how it indexes is not the user's matter
        try:  # on a twin with the same parameters first, for a model that refuses half way is spoilt
            copy.deepcopy(model, {id(p): p for p in model.parameters()}).set_input_size(**sizes)
            model.set_input_size(**sizes)
        except (AssertionError, RuntimeError, ValueError) as error:
            (height, width), windows = sizes["img_size"], sizes.get("window_size")
            into = f"into windows of {windows[0]} tokens" if windows else f"as the model does it ({reason(error)})"
            raise LinvitError(f"{height}×{width} pixels cannot be cut {into}: give another size") from error
    if table is not None and model.pos_embed is table and model.patch_embed.grid_size != grid:
        # As many tokens as before on another grid, 4×9 for 6×6: timm only looks at their number.
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        resampled = resample_abs_pos_embed(table, model.patch_embed.grid_size, grid, prefix)
        model.pos_embed = nn.Parameter(resampled.detach())
