"""The losses against timm's, on labels and on mixtures."""

from __future__ import annotations

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from linvit.errors import LinvitError
from linvit.training.objectives.distillation import Supervised, accuracy
from linvit.training.objectives.teacher import logits_of

torch.manual_seed(0)
LOGITS = torch.randn(8, 5)
LABELS = torch.arange(8) % 5


def mixture(smoothing: float) -> torch.Tensor:
    """What timm's mixup gives for these labels."""
    return mixup_target(LABELS, 5, lam=0.3, smoothing=smoothing)


def test_cross_entropy_is_timms_with_and_without_smoothing() -> None:
    for smoothing in (0.0, 0.1):
        loss = Supervised(smoothing=smoothing)
        torch.testing.assert_close(loss.measure(LOGITS, LABELS), LabelSmoothingCrossEntropy(smoothing)(LOGITS, LABELS))
        wanted = SoftTargetCrossEntropy()(LOGITS, mixture(smoothing))
        torch.testing.assert_close(loss.measure(LOGITS, mixture(0.0)), wanted)


def test_binary_cross_entropy_is_timms() -> None:
    for smoothing in (0.0, 0.1):
        loss = Supervised("bce", smoothing=smoothing)
        torch.testing.assert_close(loss.measure(LOGITS, LABELS), BinaryCrossEntropy(smoothing)(LOGITS, LABELS))
        wanted = BinaryCrossEntropy(0.0)(LOGITS, mixture(smoothing))
        torch.testing.assert_close(loss.measure(LOGITS, mixture(0.0)), wanted)


def test_the_objective_learns_in_float32_and_counts() -> None:
    model = nn.Linear(3, 5).bfloat16()
    images = torch.randn(8, 3).bfloat16()
    found = Supervised()(model, (images, LABELS))
    assert found["loss"].dtype == torch.float32 and found["loss"].requires_grad
    right = (model(images).argmax(-1) == LABELS).float().mean()
    assert found["accuracy"] == right and not found["accuracy"].requires_grad
    assert accuracy(LOGITS, mixture(0.0)) == (LOGITS.argmax(-1) == mixture(0.0).argmax(-1)).float().mean()


def test_logits_are_found_in_any_output() -> None:
    class Output:
        logits = LOGITS

    assert logits_of(LOGITS) is LOGITS and logits_of(Output()) is LOGITS
    torch.testing.assert_close(logits_of((LOGITS, LOGITS + 2)), LOGITS + 1)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(LinvitError, match="unknown loss 'crossentropy'; did you mean cross_entropy"):
        Supervised("crossentropy")
