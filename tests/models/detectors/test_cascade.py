"""The stages of Cascade Mask R-CNN against values worked by hand, and its size against QT-ViT's table."""

from math import exp, log
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit  # noqa: F401  # registers the models
from linvit.models.dense import Target
from linvit.models.detectors.cascade import STEPS, CascadeHeads, CascadeMaskRCNN, is_among

SHAPE = (128, 160)
TARGET = [0.0, 0.0, 100.0, 100.0]
CLASSES = 3


@pytest.fixture
def heads() -> Any:
    """Heads whose last layers give zeros, so that their biases alone say what comes out."""
    torch.manual_seed(0)
    limits = {"score_thresh": 0.05, "nms_thresh": 0.5, "detections_per_img": 10, "batch_size_per_image": 64}
    made = CascadeHeads(CLASSES, width=8, strides=(4, 8, 16, 32), hidden=16, **limits)
    for stage in made.stages:
        last = (stage.box_predictor.cls_score, stage.box_predictor.bbox_pred, stage.mask_predictor.mask_fcn_logits)
        for layer in last:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    return made


@pytest.fixture
def maps() -> dict[str, Tensor]:
    return {str(level): torch.randn(1, 8, 32 >> level, 40 >> level) for level in range(4)}


def target(*boxes: list[float]) -> Target:
    masks = torch.zeros(len(boxes), *SHAPE, dtype=torch.uint8)
    masks[:, :100, :100] = 1
    labels = torch.full((len(boxes),), 2)  # as the heads count, from 1
    return {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": labels, "masks": masks}


def low(height: float) -> list[float]:
    """A box whose IoU with the target is its height in percent."""
    return [0.0, 0.0, 100.0, height]


def test_each_stage_wants_a_higher_iou(heads: Any) -> None:
    proposals = torch.tensor([low(45.0), low(55.0), low(65.0), low(75.0)])
    for stage, objects in zip(heads.stages, (3, 2, 1), strict=True):
        boxes, _, (labels,), _ = stage.select_training_samples([proposals], [target(TARGET)])
        assert len(boxes[0]) == 5 and (labels == 2).sum() == objects + 1  # the target itself is one
        assert sorted(boxes[0][labels == 2, 3].tolist()) == [55, 65, 75, 100][-objects - 1 :]


@pytest.mark.parametrize("number", range(3))
def test_boxes_are_coded_by_the_stage(heads: Any, number: int) -> None:
    """A move by a tenth of the width, back by a tenth of the height, and twice as wide, then clipped."""
    deltas = torch.tensor([[0.1, -0.1, log(2.0), 0.0]]) / torch.tensor(STEPS[number].stds)
    box = heads.stages[number].refine(deltas, [torch.tensor([[10.0, 20.0, 30.0, 60.0]])], [(50, 40)])
    torch.testing.assert_close(box, [torch.tensor([[2.0, 16.0, 40.0, 50.0]])])


def test_losses_by_hand(heads: Any, maps: dict[str, Tensor]) -> None:
    """Logits and deltas are 0. The proposal is an object to the first stage, with its target beside it; it comes back
    as it was, and to the later stages only the target is one."""
    found, losses = heads(maps, [torch.tensor([low(55.0)])], [SHAPE], [target(TARGET)])
    assert found == []
    moves = (22.5 / 55 / 0.1, log(100 / 55) / 0.2)
    expected = {"loss_box_reg_1": (sum(moves) - 1) / 2, "loss_box_reg_2": 0.0, "loss_box_reg_3": 0.0}
    for number, step in enumerate(STEPS, start=1):
        expected |= {f"loss_classifier_{number}": step.weight * log(CLASSES + 1)}
        expected |= {f"loss_mask_{number}": step.weight * log(2)}
    assert {name: float(value.detach()) for name, value in losses.items()} == pytest.approx(expected, abs=1e-5)


def test_the_stage_before_moves_the_proposals(heads: Any, maps: dict[str, Tensor]) -> None:
    """Stretched by the first stage to IoU 0.65, the proposal is an object to the second."""
    with torch.no_grad():
        heads.stages[0].box_predictor.bbox_pred.bias.copy_(
            torch.tensor([0, 0.5 * 10 / 55 / 0.1, 0, log(65 / 55) / 0.2])
        )
    _, losses = heads(maps, [torch.tensor([low(55.0)])], [SHAPE], [target(TARGET)])
    moves = (17.5 / 65 / 0.05, log(100 / 65) / 0.1)
    assert float(losses["loss_box_reg_2"].detach()) == pytest.approx(0.5 * (sum(moves) - 1) / 2, rel=1e-4)
    assert losses["loss_box_reg_3"] == 0


def test_targets_are_not_passed_on(heads: Any, maps: dict[str, Tensor]) -> None:
    _, kept = heads.stages[0].learn(maps, [torch.tensor([low(55.0), low(20.0)])], [SHAPE], [target(TARGET)])
    assert sorted(kept[0][:, 3].tolist()) == pytest.approx([20, 55])
    assert is_among(torch.tensor([low(1.0), TARGET]), torch.tensor([TARGET])).tolist() == [False, True]
    assert is_among(torch.tensor([TARGET]), torch.zeros(0, 4)).tolist() == [False]


def test_masks_are_learned_by_label(heads: Any, maps: dict[str, Tensor]) -> None:
    """Only the channel of the target's class is judged: label 2 of the heads is the second of the masks."""
    with torch.no_grad():
        heads.stages[0].mask_predictor.mask_fcn_logits.bias.copy_(torch.tensor([50.0, 1.0, 50.0]))
    found, _ = heads.stages[0].learn(maps, [torch.zeros(0, 4)], [SHAPE], [target(TARGET)])
    assert float(found["mask"].detach()) == pytest.approx(log(1 + exp(-1)), rel=0.05)  # all but the edge is 1


@torch.no_grad()
def test_detections_by_hand(heads: Any, maps: dict[str, Tensor]) -> None:
    """Each stage moves the box by its own std; logits and mask probabilities are means over the stages."""
    logits = torch.tensor([[0.0, 3.0, 0.0, 0.0], [0.0, 3.0, 1.5, 0.0], [0.0, 0.0, 3.0, 0.0]])
    for stage, bias, mask in zip(heads.stages, logits, (2.0, -1.0, -1.0), strict=True):
        stage.box_predictor.cls_score.bias.copy_(bias)
        stage.box_predictor.bbox_pred.bias[0] = 1.0
        stage.mask_predictor.mask_fcn_logits.bias.fill_(mask)
    (found,), losses = heads.eval()(maps, [torch.tensor([[10.0, 10.0, 30.0, 30.0]])], [SHAPE])
    total = exp(2) + exp(1.5) + 2
    assert losses == {} and found["labels"].tolist() == [1, 2, 3]
    assert found["scores"].tolist() == pytest.approx([exp(2) / total, exp(1.5) / total, 1 / total])
    right = 20 * (0.1 + 0.05 + 0.033)
    torch.testing.assert_close(found["boxes"], torch.tensor([[10 + right, 10.0, 30 + right, 30.0]]).expand(3, 4))
    sigmoid = [1 / (1 + exp(-value)) for value in (2, -1, -1)]
    assert found["masks"].shape == (3, 1, 28, 28)
    torch.testing.assert_close(found["masks"], torch.full((3, 1, 28, 28), sum(sigmoid) / 3))


@torch.no_grad()
def test_no_proposals(heads: Any, maps: dict[str, Tensor]) -> None:
    (found,), _ = heads.eval()(maps, [torch.zeros(0, 4)], [SHAPE])
    assert found["boxes"].shape == (0, 4) and found["masks"].shape == (0, 1, 28, 28)
    _, losses = heads.train()(maps, [torch.zeros(0, 4)], [SHAPE], [target()])
    assert all(value == 0 for value in losses.values())


class Counted(nn.Module):
    strides = (4, 8, 16, 32)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.trunk = timm.create_model(name, features_only=True)
        self.channels = tuple(self.trunk.feature_info.channels())


PRINTED = {
    "efficientvit_b1": "57.6",
    "efficientvit_b2": "68.0",
    "efficientvit_b3": "92.1",
    "qtvit_1": "57.9",
    "qtvit_2": "68.5",
    "qtvit_3": "93.1",
}


@pytest.mark.parametrize("name", PRINTED)
def test_size_is_the_one_qtvit_prints(name: str) -> None:
    """80 classes; the trunk without its classifier and the convolution before it, position tables for 224×224."""
    with torch.device("meta"):
        model = CascadeMaskRCNN(Counted(name), 80)  # type: ignore[arg-type]
    assert f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}" == PRINTED[name]
