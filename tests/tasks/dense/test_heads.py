"""Every head on every kind of backbone learns a few pictures by heart, is saved, loaded and judged again; and a killed
training of every head goes on to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit.models.dense import HEADS
from linvit.tasks.dense.readers import open_dense
from linvit.tasks.dense.samples import Samples
from tests.dense_shapes import SIZE, write_boxes, write_masks

VIT = {"embed_dim": 48, "depth": 4, "num_heads": 3, "img_size": SIZE}
KINDS: dict[str, dict[str, Any]] = {
    "own": {
        "backbone": "fair_pyramid_p4_sa",
        "backbone_args": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
    },
    "simple": {
        "backbone": "vit_tiny_patch16_224",
        "backbone_args": {**VIT, "patch_size": 8},
        "pyramid_args": {"width": 32},
    },
    "adapter": {
        "backbone": "vit_tiny_patch16_224",
        "backbone_args": {**VIT, "embed_dim": 24, "num_heads": 2},
        "pyramid_args": {"stem_width": 16, "heads": 2, "points": 2},
    },
}
RCNN = {"width": 16, "hidden": 32, "anchor_sizes": (8, 16, 32, 64, 128), "proposals": 32, "samples": 32}
QUERIES = {"channels": 32, "queries": 10, "pixel_layers": 1, "layers": 2, "heads": 4, "points": 256}
# How each head is made small, and for how many steps at which rate it learns.
SMALL: dict[str, tuple[dict[str, Any], int, float]] = {
    "faster_rcnn": (RCNN, 60, 4e-3),
    "mask_rcnn": (RCNN, 45, 5e-3),
    "cascade_mask_rcnn": (RCNN, 40, 4e-3),
    "picodet": ({"size": "s"}, 70, 1e-2),
    "semantic_fpn": ({"channels": 32, "head_channels": 32}, 50, 8e-3),
    "upernet": ({"channels": 32, "auxiliary_channels": 16, "dropout": 0.0}, 80, 8e-3),
    "mask2former": ({**QUERIES, "pixel_feedforward": 64, "feedforward": 64}, 25, 5e-3),
}
PLAIN = ["batch_size=2", "precision=fp32", "trunk_lr=1", "scale_jitter=1,1", "photometric=false", "flip=0"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("shapes")
    return {"detect": write_boxes(place / "boxes", 2, 1), "segment": write_masks(place / "masks", 2, 1)}


def pictures(folders: dict[str, Path], head: str) -> Samples:
    """Two of them, to learn and to be judged on."""
    task = HEADS[head].task
    return open_dense(folders[task], task, masks=HEADS[head].masks)[0]


def make(head: str, kind: str, classes: int) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(head, **KINDS[kind], **SMALL[head][0], pyramid=kind, num_classes=classes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", SMALL)
def test_learns_by_heart(head: str, kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    samples, (_, steps, rate) = pictures(folders, head), SMALL[head]
    model = make(head, kind, len(samples.categories))
    lasting = [f"epochs={steps}", f"eval_epochs={steps}", f"warmup_epochs={steps / 10}", f"lr={rate}"]
    options: dict[str, Any] = {"size": SIZE, "output": tmp_path, "settings": [*PLAIN, *lasting], "workers": 0}
    found = linvit.train(model, (samples, samples), "finetune", **options)
    score = "AP50" if HEADS[head].task == "detect" else "mIoU"
    assert found.last[score] >= 0.9, found.last
    if HEADS[head].masks:
        assert found.last["mask_AP50"] >= 0.9, found.last
    again = linvit.evaluate(linvit.load(tmp_path / "last"), samples, batch=2, workers=0)
    assert again.metrics()[score] == pytest.approx(found.last[score], abs=1e-3)


class Killed(Exception):
    pass


@pytest.mark.parametrize("head", SMALL)
def test_a_killed_training_goes_on_to_the_same_bits(head: str, folders: dict[str, Path], tmp_path: Path) -> None:
    samples = pictures(folders, head)
    settings = ["batch_size=2", "precision=fp32", "epochs=4", "lr=1e-3", "checkpoint_seconds=0", "log_steps=1"]

    def run(place: str, after: int = -1, resume: bool = False) -> nn.Module:
        def watch(record: dict[str, Any]) -> None:
            if record["kind"] == "train" and record["step"] == after:
                raise Killed

        options: dict[str, Any] = {"size": SIZE, "workers": 0, "output": tmp_path / place, "watch": watch}
        model = make(head, "own", len(samples.categories))
        found = linvit.train(model, (samples, None), "finetune", settings=settings, resume=resume, **options)
        assert found.model is not None
        return found.model

    whole = run("whole")
    with pytest.raises(Killed):
        run("killed", after=3)
    parts = run("killed", resume=True)
    for (name, one), other in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
