"""Drop path set on a finished model, so that a recipe decides it and not how the model was built."""

import torch
from timm.layers import DropPath
from timm.models.efficientvit_mit import ResidualBlock
from torch import Tensor, nn


def set_drop_path(model: nn.Module, rate: float, skip: int = 0, rule: str = "linear") -> bool:
    """Drop residual branches, except in the first `skip` blocks. By the rule the rate grows evenly from 0 in the first
    block to `rate` in the last (linear), is the same in all (constant), or grows evenly from the first block that is
    not skipped on, and with the training (ramped). False where the model has no place for it."""
    give_places(model)
    kinds = nn.Identity | DropPath | RampedDropPath  # what timm's blocks hold as their drop path
    places: dict[nn.Module, list[str]] = {}
    for owner in model.modules():
        for name, child in owner.named_children():
            theirs = type(child).__name__.endswith("DropPath")  # each of Hugging Face's models has a class of its own
            if name.startswith("drop_path") and (theirs or isinstance(child, kinds)):
                places.setdefault(owner, []).append(name)
    for index, (owner, names) in enumerate(places.items()):
        own = rate
        if rule == "linear":
            own = rate * index / max(1, len(places) - 1)
        elif rule == "ramped":
            own = rate * (index + 1 - skip) / max(1, len(places) - skip)
        for name in names:
            made = RampedDropPath(own) if rule == "ramped" else DropPath(own)
            setattr(owner, name, made if own and index >= skip else nn.Identity())
    return bool(places)


def give_places(model: nn.Module) -> None:
    """timm's EfficientViT has no drop path. The residual blocks of its stages get a place for one, as in its released
    code, the stem's do not; their weights keep their names."""
    for module in getattr(model, "stages", model).modules():
        if type(module) is ResidualBlock and isinstance(module.shortcut, nn.Identity):
            module.__class__ = DroppedResidual
            module.drop_path = nn.Identity()


class DroppedResidual(ResidualBlock):
    """EfficientViT's residual block with a branch that can be dropped."""

    main: nn.Module
    shortcut: nn.Module
    drop_path: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.main(self.pre_norm(x))) + self.shortcut(x)


class RampedDropPath(nn.Module):
    """Drop path whose rate grows with the training: `progress` goes from 0 to 1. It is a tensor, so that a recorded or
    compiled step sees it change."""

    progress: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("progress", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = (1 - self.rate * self.progress).clamp(min=1e-6)
        drawn = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device) < keep
        return x * (drawn / keep).to(x.dtype)
