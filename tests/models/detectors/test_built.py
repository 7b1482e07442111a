"""R-CNNs by name, on real backbones of each kind: they learn, see, and are saved and loaded."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import linvit
import linvit.models.dense  # registers the detectors
from tests.models.detectors.small import rectangles

LIGHT: dict[str, Any] = {
    "num_classes": 3,
    "width": 16,
    "hidden": 32,
    "anchor_sizes": (8, 16, 32, 64, 128),
    "proposals": 32,
    "samples": 16,
    "detections": 5,
    "score_threshold": 0.2,
}
SMALL_VIT = {"depth": 4, "embed_dim": 48, "num_heads": 3}
BACKBONES: dict[str, dict[str, Any]] = {
    "own": {"backbone": "efficientvit_b0"},
    "simple": {"backbone": "vit_tiny_patch16_224", "pyramid": "simple", "backbone_args": SMALL_VIT},
    "adapter": {"backbone": "vit_tiny_patch16_224", "pyramid": "adapter", "backbone_args": SMALL_VIT},
}


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", ["faster_rcnn", "mask_rcnn", "cascade_mask_rcnn"])
def test_learns_sees_and_loads(name: str, backbone: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, **BACKBONES[backbone], **LIGHT)
    images, targets = rectangles((64, 90), (70, 64))
    losses = model(images, targets)
    total = sum(losses.values(), torch.zeros(()))
    total.backward()
    assert total.isfinite() and not [key for key, weight in model.named_parameters() if weight.grad is None]
    model.eval()
    linvit.save(model, tmp_path / "saved")
    again = linvit.load(tmp_path / "saved")
    with torch.no_grad():
        seen = model(images, targets)
        torch.testing.assert_close(again(images, targets), seen)
    assert sum(len(each["boxes"]) for each in seen) and all(each["boxes"].isfinite().all() for each in seen)
