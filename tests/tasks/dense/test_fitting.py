"""A detector or segmenter brought into the recipe's form."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from linvit.conversion.saving import note
from linvit.models.dense import DenseModel
from linvit.tasks.dense import fitting
from linvit.tasks.dense.fitting import DenseFitting, DenseSets, DenseTask, settings_of, trained_settings
from linvit.tasks.dense.readers import open_dense
from linvit.training import Config, Processes, recipe
from tests.dense_shapes import write_boxes, write_masks

TRUNK: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 24, "depth": 4, "num_heads": 2}
HEADS: dict[str, dict[str, Any]] = {
    "semantic_fpn": {"channels": 16, "head_channels": 16},
    "mask_rcnn": {"width": 16, "hidden": 32, "proposals": 20, "samples": 16},
}
Make = Callable[..., DenseFitting]


def model_of(head: str, **args: Any) -> Any:
    torch.manual_seed(0)
    around = {"backbone": "vit_tiny_patch16_224", "backbone_args": TRUNK, "pyramid": "adapter", **HEADS[head]}
    return timm.create_model(head, num_classes=3 if head == "semantic_fpn" else 2, **around, **args)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(model: DenseModel, processes: Processes | None = None, **values: Any) -> DenseFitting:
        if not (folder := tmp_path / "set").exists():
            (write_masks if model.task == "segment" else write_boxes)(folder, 2, 2)
        sets = open_dense(folder, model.task, masks=model.masks)
        config = Config(batch_size=2, precision="fp32", size=64, compile="off", **values)
        return DenseFitting(model, DenseSets(*sets), config, processes=processes)

    return made


def rates(modules: Any) -> list[float]:
    return [getattr(module.drop_path, "drop_prob", 0.0) for module in modules]


def test_the_adapter_has_the_recipes_drop_path(make: Make) -> None:
    """The whole of it in each extractor but the two that follow the last, where the trunk's grows over the blocks."""
    model = model_of("semantic_fpn")
    make(model, drop_path=0.3)
    adapter, blocks = model.backbone.pyramid, model.backbone.trunk.blocks
    assert rates(adapter.extractors) == [0.3] * 4 and rates(adapter.more_extractors) == [0.0] * 2
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3])
    other = model_of("semantic_fpn", pyramid_args={"drop_path": 0.2})
    assert rates(other.backbone.pyramid.extractors) == [0.2] * 4
    assert rates(other.backbone.pyramid.more_extractors) == [0.0] * 2
    make(other)
    assert not any(isinstance(module, DropPath) for module in other.modules())


def test_the_adapter_is_that_of_the_task() -> None:
    """Its authors' segmenters add the ViT's tokens of every stage, their detectors the last."""
    assert model_of("semantic_fpn").backbone.pyramid.every_stage
    assert not model_of("semantic_fpn", pyramid_args={"every_stage": False}).backbone.pyramid.every_stage
    assert not model_of("mask_rcnn").backbone.pyramid.every_stage


def test_gpus_share_their_batch_norm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and weights stay, so that what was trained so loads as ever."""
    model = model_of("semantic_fpn")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    processes = Processes("cpu")
    monkeypatch.setattr(fitting.Fitting, "prepare_model", lambda self, model: None)
    made = make(model, processes)
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    processes.world, processes.device = 2, torch.device("cuda")
    made.prepare_model(model)
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) == norms > 4
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("ema", [None, 0.5])
def test_what_a_run_ended_with_is_judged_once(ema: float | None, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, judged = make(model_of("semantic_fpn"), epochs=2, ema=ema), list[nn.Module]()
    evaluate = DenseTask.evaluate
    monkeypatch.setattr(DenseTask, "evaluate", lambda task, model: judged.append(model) or evaluate(task, model))
    outcome = made.run()
    before = len(judged)
    found = made.evaluate()
    assert len(judged) == before > 1 and found.metrics() == outcome.last
    assert made.evaluate(made.shown).metrics() == found.metrics() and len(judged) == before + 1
    with torch.no_grad():
        next(made.shown.parameters()).zero_()
    assert made.evaluate() is not found and len(judged) == before + 2
    made.close()


def test_the_longer_side_at_most() -> None:
    """As on COCO, where detectors are trained, and on ADE20K, where segmenters are."""
    config = Config(resize="shortest", size=800)
    assert settings_of(model_of("mask_rcnn"), config).longest == 1333
    assert settings_of(model_of("semantic_fpn"), config).longest == 3200
    assert settings_of(model_of("semantic_fpn"), Config(size=512)).longest is None


def test_a_trained_model_is_aligned_on_images_as_it_knows_them() -> None:
    """At another size, or squeezed where it had seen shapes, it would be aligned and judged on what it never saw."""
    model, fast = model_of("semantic_fpn"), recipe("fast", task="segment")
    note(model, input_size=(3, 96, 96), crop_mode="center")
    found = settings_of(model, fast)
    assert (found.size, found.resize, found.longest) == (96, "shortest", 384)
    assert trained_settings(model) == replace(found, scale_jitter=None, photometric=False)
    assert trained_settings(model, 48) == replace(trained_settings(model), size=48, longest=192)
    told = settings_of(model, replace(fast, size=64, resize="longest"))
    assert (told.size, told.resize, told.longest) == (64, "longest", None)


@pytest.mark.parametrize("head", HEADS)
def test_a_batch_at_another_size(head: str, make: Make) -> None:
    """Boxes, masks and labels go with the images, and the head learns from them."""
    made = make(model_of(head), resize="longest")
    assert isinstance(made.task, DenseTask)
    images, targets = next(made.source.epoch(0))
    smaller, others = made.task.resize((images, targets), 32)
    assert smaller.shape == (2, 3, 32, 32) and made.task.resize((images, targets), 64)[0] is images
    for target, other in zip(targets, others, strict=True):
        assert other.keys() == target.keys() and torch.equal(other["size"], target["size"] // 2)
        if head == "mask_rcnn":
            torch.testing.assert_close(other["boxes"], target["boxes"] / 2)
            assert other["masks"].shape[1:] == (32, 32) and other["masks"].dtype == target["masks"].dtype
        else:
            assert other["labels"].shape == (32, 32)
            assert set(other["labels"].flatten().tolist()) <= set(target["labels"].flatten().tolist())
    losses = made.engine.model.train()(smaller, others)
    assert all(loss.isfinite() for loss in losses.values())
