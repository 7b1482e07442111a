"""Each segmenter on each kind of backbone: built by name, trained a step, converted, saved and loaded."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import linvit
import linvit.models.dense  # which tells timm the names
from tests.models.segmenters.pictures import CLASSES, shapes

HEADS: dict[str, dict[str, Any]] = {
    "semantic_fpn": {"channels": 16, "head_channels": 16},
    "upernet": {"channels": 16, "auxiliary_channels": 8},
    "mask2former": {"channels": 32, "queries": 6, "pixel_layers": 1, "layers": 2, "heads": 2, "points": 64},
}
PVT = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 2, 4, 4)}
VIT = {"depth": 4, "embed_dim": 48, "num_heads": 3}
BACKBONES: dict[str, dict[str, Any]] = {
    "own": {"backbone": "pvt_v2_b0", "backbone_args": PVT},
    "simple": {"backbone": "vit_tiny_patch16_224", "pyramid": "simple", "backbone_args": VIT},
    "adapter": {"backbone": "vit_tiny_patch16_224", "pyramid": "adapter", "backbone_args": VIT},
}
each = pytest.mark.parametrize("kind", BACKBONES)
every = pytest.mark.parametrize("name", HEADS)


def build(name: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=CLASSES, **HEADS[name], **BACKBONES[kind])


@every
@each
def test_trains_a_step_on_padded_images(name: str, kind: str) -> None:
    model = build(name, kind).train()
    images, targets = shapes(2, 40, 56)
    images = torch.nn.functional.pad(images, (0, 8, 0, 24))
    losses = model(images, targets)
    torch.stack(list(losses.values())).sum().backward()
    learning = [p for p in model.parameters() if p.grad is not None and p.grad.any()]
    assert all(p.grad.isfinite().all() for p in learning) and len(learning) > 0.7 * len(list(model.parameters()))
    with torch.no_grad():
        assert model.eval()(images, targets).shape == (2, CLASSES, 64, 64)


@every
@each
def test_converts_saves_and_loads(name: str, kind: str, tmp_path: Path) -> None:
    model = build(name, kind).eval()
    report = linvit.convert(model, "stella")
    assert report.layers and all(layer.name.startswith("backbone.trunk.") for layer in report.layers)
    linvit.save(model, tmp_path)
    again = linvit.load(tmp_path)
    images = shapes(1, 64, 96)[0]
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
