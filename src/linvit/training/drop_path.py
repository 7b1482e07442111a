"""Drop path set on a finished model, so that a recipe decides it and not how the model was built."""

from __future__ import annotations

from timm.layers import DropPath
from torch import nn


def set_drop_path(model: nn.Module, rate: float, skip: int = 0) -> bool:
    """Drop residual branches at a rate that grows evenly from 0 in the first block to `rate` in the last; the first
    `skip` blocks drop nothing. False where the model has no place for it."""
    owners = [(owner, names) for owner in model.modules() if (names := places(owner))]
    for index, (owner, names) in enumerate(owners):
        own = rate * index / max(1, len(owners) - 1) if index >= skip else 0.0
        for name in names:
            setattr(owner, name, DropPath(own) if own else nn.Identity())
    return bool(owners)


def places(owner: nn.Module) -> list[str]:
    """The names under which timm's blocks hold their drop path."""
    children = owner.named_children()
    return [n for n, child in children if n.startswith("drop_path") and isinstance(child, nn.Identity | DropPath)]
