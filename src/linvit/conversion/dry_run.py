"""One picture through a model without computing anything, for hooks that only look at shapes."""

import torch
from torch import nn


def image_part(model: nn.Module) -> nn.Module:
    """The part of a model that images go through without being looked at: of a detector or a segmenter its backbone,
    for what its head does depends on what is in them."""
    backbone = getattr(model, "backbone", None)
    return backbone if isinstance(backbone, nn.Module) and hasattr(backbone, "trunk") else model


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
    channels = getattr(getattr(part, "trunk", part), "in_chans", 3)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            picture = torch.empty(1, channels, *size, device="meta", dtype=like.dtype)
            try:
                torch.func.functional_call(part.eval(), meta, (picture,), tie_weights=False)
            except (RuntimeError, NotImplementedError):  # a model that looks at its data, as Gemma 4 for padding
                part(torch.zeros_like(picture, device=like.device))
    finally:
        part.train()  # timm's LeViT forgets the biases it cached in evaluation mode only so
        for module, training in modes:
            module.training = training
