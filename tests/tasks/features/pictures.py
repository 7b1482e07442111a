"""Real photographs, cut into tiles, and a backbone whose attention matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import skimage.data
import timm
import torch
from PIL import Image
from torch import nn

FILES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "brick.png", "grass.png")
SHAPE: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "reg_tokens": 2}
QUICK = ["precision=fp32", "batch_size=16"]
HERE: dict[str, Any] = {"device": "cpu", "workers": 0}


def write_tiles(folder: Path, *, labelled: bool = False, side: int = 40) -> Path:
    """Sixteen tiles of each photograph: right in the folder, or in a class folder for each, every fourth in val."""
    for file in FILES:
        picture = Image.open(Path(skimage.data.__file__).parent / file).convert("RGB")
        width, height = picture.width // 4, picture.height // 4
        for index in range(16):
            left, top = index % 4 * width, index // 4 * height
            split = "val" if index % 4 == index // 4 else "train"
            name = Path(file).stem
            place = folder / split / name / f"{index}.png" if labelled else folder / f"{name}{index}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            picture.crop((left, top, left + width, top + height)).resize((side, side)).save(place)
    return folder


def backbone(seed: int = 0, **options: Any) -> nn.Module:
    """A ViT without classifier, with class and register tokens and sharp attention."""
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", **{"num_classes": 0, **SHAPE, **options})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(8 if "qkv.weight" in name else 4 if "attn.proj.weight" in name else 1)
    return model.eval()
