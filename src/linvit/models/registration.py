"""Named models are timm models: `timm.create_model(name)` builds them once `linvit` is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import register_model
from timm.models._registry import _model_entrypoints
from torch import nn

from linvit.errors import LinvitError

TIMMS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # arguments timm adds that shape no model


def default_cfg(**overrides: Any) -> dict[str, Any]:
    """What timm wants to know about a model nobody has published weights for."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        **overrides,
    }


def add_model(
    module: str,
    name: str,
    build: Callable[..., nn.Module],
    cfg: dict[str, Any],
    instead: str = "build it with pretrained=False and train it",
) -> None:
    """Register `name` with timm as a function of the module called `module`. `build` takes timm's keyword arguments."""

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            raise LinvitError(f"no weights are published for {name}: {instead}")
        model = build(name, **kwargs)
        args = {key: value for key, value in kwargs.items() if key not in TIMMS}
        model.linvit_origin = {"name": name, "args": args}  # type: ignore[assignment]  # for linvit.save
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module
    vars(sys.modules[module]).setdefault("default_cfgs", {})[name] = cfg
    setattr(sys.modules[module], name, entrypoint)
    register_model(entrypoint)


def list_models() -> list[str]:
    """Names of all models this package registered with timm, sorted."""
    return sorted(name for name, entry in _model_entrypoints.items() if entry.__module__.startswith("linvit.models."))
