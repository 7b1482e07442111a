"""MACs of detectors and segmenters by part, against the count without data and by hand."""

from typing import Any

import timm

import linvit
from linvit.conversion.opening import open_model
from linvit.measurement import measure_macs
from linvit.measurement.dense_macs import macs_of_parts

TRUNK = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 4, "num_heads": 2}


def dense(name: str, **args: Any) -> Any:
    around = {"backbone": "vit_tiny_patch16_224", "backbone_args": TRUNK, "num_classes": 5, **args}
    return open_model(name, pretrained=False, args=around)


def test_a_segmenter_as_without_data() -> None:
    model = dense("semantic_fpn", channels=16, head_channels=16, pyramid="adapter")
    for plan in ("", "stella"):
        if plan:
            linvit.convert(model, plan)
        found, known = macs_of_parts(model, (96, 64)), measure_macs(model, (3, 96, 64))
        assert found["whole"] == known.total() == found["backbone"] + found["neck"] + found["head"]
        if plan:
            assert found["attention"] == known.attention
        else:  # two products of 24 × 24 tokens over 48 channels, in four layers
            assert found["attention"] == 4 * 2 * 24 * 24 * 48
    assert timm.is_model("semantic_fpn")


def test_layers_that_keep_softmax_count_as_attention() -> None:
    model = dense("semantic_fpn", channels=16, head_channels=16)
    whole = macs_of_parts(model, (64, 64))
    linvit.convert(model, "mixa", keep=2)
    part = macs_of_parts(model, (64, 64))
    linvit.convert(model, "stella")
    none = macs_of_parts(model, (64, 64))
    assert whole["attention"] + none["attention"] == 2 * part["attention"]
    assert part["backbone"] - part["attention"] == whole["backbone"] - whole["attention"]


def test_heads_of_boxes_by_hand() -> None:
    """With the most proposals and detections: the count does not depend on what random weights find."""
    sizes = {"width": 16, "hidden": 32, "proposals": 30, "detections": 7, "anchor_sizes": [8, 16, 24, 32, 48]}
    classes, places = 6, sum(side * side for side in (16, 8, 4, 2, 1))
    rpn = places * 16 * (9 * 16 + 3 * 5)
    boxes = 30 * (16 * 49 * 32 + 32 * 32 + 32 * 5 * classes)
    assert macs_of_parts(dense("faster_rcnn", **sizes), (64, 64))["head"] == rpn + boxes
    masks = 7 * (14 * 14 * 9 * 16 * 16 * 4 + 28 * 28 * 16 * 16 + 28 * 28 * 16 * classes)
    assert macs_of_parts(dense("mask_rcnn", **sizes), (64, 64))["head"] == rpn + boxes + masks
