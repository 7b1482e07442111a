"""One picture through a model without computing anything, for hooks that only look at shapes."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from linvit.conversion.grids import stem

TOWERS = ("vision_model", "vision_encoder", "vision_tower")  # what Hugging Face calls the part of a model that sees


def image_part(model: nn.Module) -> nn.Module:
    """The part of a model that images go through without being looked at: of a detector or a segmenter its backbone,
    for what its head does depends on what is in them, and of Hugging Face's models with text or prompts the tower."""
    backbone = getattr(model, "backbone", None)
    if isinstance(backbone, nn.Module) and hasattr(backbone, "trunk"):
        return backbone
    parts = (getattr(getattr(model, "base_model", model), name, None) for name in TOWERS)
    return next((part for part in parts if isinstance(part, nn.Module)), model)


def without_head(model: nn.Module) -> nn.Module:
    """What lies under the head of one of Hugging Face's models. DINOv3 calls its encoder, without the embeddings, the
    base."""
    base = getattr(model, "base_model", model)
    return base if any(stem(module) is not None for module in base.modules()) else model


def channels_of(part: Any) -> int:
    """How many channels the images have that the part of a model takes."""
    noted = (getattr(part, "trunk", part), "in_chans"), (getattr(part, "config", None), "num_channels")
    known: int | None = next((found for place in noted if (found := getattr(*place, None)) is not None), None)
    first = next((module for module in part.modules() if isinstance(module, nn.Conv2d)), None)
    return known or (3 if first is None else first.in_channels)


def inputs_for(model: Any, images: Tensor) -> dict[str, Tensor]:
    """Images as a model takes them: SigLIP 2 gets patches, a mask and the sizes they are from."""
    first, *others = inspect.signature(model.forward).parameters
    if "spatial_shapes" not in others:
        return {first: images}
    side = model.config.patch_size
    patches = images.unfold(2, side, side).unfold(3, side, side)
    rows, columns = patches.shape[2:4]
    sizes = torch.tensor([[rows, columns]] * len(images))
    patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    mask = torch.ones(patches.shape[:2], dtype=torch.long, device=images.device)
    return {first: patches, "pixel_attention_mask": mask, "spatial_shapes": sizes}


def dry_run(model: nn.Module, size: tuple[int, int]) -> None:
    """On the meta device, or in earnest where a model looks at its data. The model stays as it is."""
    part = image_part(model)
    # Every module once: functional_call would not put back what it finds under two names (CoaT shares modules).
    meta = {
        f"{owner}.{name}" if owner else name: tensor.to("meta")
        for owner, module in part.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    like = next(parameter for parameter in part.parameters() if parameter.is_floating_point())
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            picture = torch.empty(1, channels_of(part), *size, device="meta", dtype=like.dtype)
            try:
                torch.func.functional_call(part.eval(), meta, (), inputs_for(part, picture), tie_weights=False)
            except (RuntimeError, NotImplementedError):  # a model that looks at its data, as Gemma 4 for padding
                part(**inputs_for(part, torch.zeros_like(picture, device=like.device)))
    finally:
        part.train()  # timm's LeViT forgets the biases it cached in evaluation mode only so
        for module, training in modes:
            module.training = training
