"""Saved models for transformers' Auto classes: importing this folder makes the model type `linvit` known to them.

`AutoModelForImageClassification.from_pretrained(folder)` then gives what `linvit.load(folder)` does, a model of
transformers' own class with its mechanisms in place. Without linvit the type is unknown to transformers, so a converted
model is never taken for one with softmax.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from linvit.conversion.dry_run import without_head
from linvit.errors import LinvitError

TYPE = "linvit"
# The Auto classes for models that see, beside AutoModel.
AUTO = (
    *("AutoBackbone", "AutoModelForDepthEstimation", "AutoModelForImageClassification", "AutoModelForImageToImage"),
    *("AutoModelForInstanceSegmentation", "AutoModelForMaskGeneration", "AutoModelForMaskedImageModeling"),
    *("AutoModelForObjectDetection", "AutoModelForPreTraining", "AutoModelForSemanticSegmentation"),
    *("AutoModelForUniversalSegmentation", "AutoModelForZeroShotImageClassification"),
    "AutoModelForZeroShotObjectDetection",
)


class LinvitConfig(PreTrainedConfig):
    """What `linvit.save` wrote, as far as an Auto class needs it: that it is linvit's."""

    model_type = TYPE


class LinvitModel:
    """Stands for saved models where an Auto class looks for one. `wanted` is what that class is called."""

    config_class = LinvitConfig
    wanted: ClassVar[str] = "AutoModel"

    @classmethod
    def from_pretrained(cls, name: str | Path, *args: Any, revision: str | None = None, **settings: Any) -> nn.Module:
        """The saved model of a folder or the hub, if this Auto class is meant for such; AutoModel gives what lies under
        a head."""
        from linvit.conversion.saving import load

        place = str(name) if Path(name).is_dir() else f"hf-hub:{name}"
        model: Any = load(place, revision=revision if place.startswith("hf-hub:") and revision != "main" else None)
        if cls.wanted == "AutoModel":
            model = without_head(model)
        elif type(model) not in getattr(transformers, cls.wanted)._model_mapping.values():
            held = type(model).__name__
            raise LinvitError(f"{name} holds a {held}, which {cls.wanted} does not build: linvit.load opens it")
        dtype = settings.get("dtype") or settings.get("torch_dtype")
        if dtype not in (None, "auto"):
            model = model.to(dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype)))
        where = settings.get("device_map")
        if isinstance(where, dict):
            raise LinvitError("a converted model lies on one device: give device_map='cuda', or none")
        if where == "auto":
            where = "cuda" if torch.cuda.is_available() else "cpu"
        return model if where is None else model.to(where)


def register() -> None:
    AutoConfig.register(TYPE, LinvitConfig, exist_ok=True)
    AutoModel.register(LinvitConfig, LinvitModel, exist_ok=True)  # type: ignore[arg-type]
    for name in AUTO:
        if (auto := getattr(transformers, name, None)) is not None:
            kind = type(f"LinvitFor{name}", (LinvitModel,), {"wanted": name, "__module__": __name__})
            auto.register(LinvitConfig, kind, exist_ok=True)


register()
