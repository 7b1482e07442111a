"""A loss that is NaN: the step, the place where it began, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linvit.training.engine.loop import Diverged
from linvit.training.logs import read_log
from linvit.training.objectives.distillation import Distillation
from linvit.training.objectives.teacher import Teacher
from tests.training.toys import ToySource, cross_entropy, small_model, train


class Poisoned(ToySource):
    """Data with one picture that is infinite."""

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Any:
        for step, (images, targets) in enumerate(super().epoch(epoch, skip), start=skip):
            yield (images * float("inf") if (epoch, step) == (1, 1) else images), targets


class Overflowing(nn.Module):
    """An identity until its limit of calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Overflowing.calls += 1
        return x * (float("nan") if Overflowing.calls > 6 else 1)


def test_nan_names_the_step_and_the_layer_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    model = small_model()
    model.blocks[1].mlp.drop1 = Overflowing()
    Overflowing.calls = 0
    with pytest.raises(Diverged) as stop:
        train(model, tmp_path, epochs=4, log_steps=3, checkpoint_seconds=0, evaluate=None)
    text = str(stop.value)
    assert "in step 7:" in text and "the activations of blocks.1.mlp.drop1 (Overflowing)" in text
    last = [record for record in read_log(tmp_path) if record["kind"] == "train"][-1]
    assert f"the loss was {last['loss']:.3g}, the gradient's norm {last['gradient_norm']:.3g}" in text
    assert f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-00000006.safetensors'}" in text
    assert all(torch.isfinite(p).all() for p in model.parameters()), "the bad step left the weights alone"
    assert read_log(tmp_path)[-1]["kind"] == "note"


def test_a_poisoned_batch_is_named() -> None:
    with pytest.raises(Diverged, match=r"in step 6: it began in the batch itself; .*there was no checkpoint yet"):
        train(source=Poisoned())


def test_infinite_gradients_are_named() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float("inf")

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        entries = cross_entropy(model, images, targets)
        return {"loss": Bad.apply(entries["loss"])}

    with pytest.raises(Diverged, match=r"in step 1: it began in the gradient of head\.bias"):
        train(objective=objective)


def test_nan_is_named_in_models_with_batch_norm() -> None:
    """The bad batch has spoilt the running statistics too, which is not where it began."""
    parts = (nn.Conv2d(3, 4, 3), Overflowing(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    Overflowing.calls = 0
    with pytest.raises(Diverged, match=r"in step 7: it began in the activations of 1 \(Overflowing\)"):
        train(nn.Sequential(*parts), epochs=4, log_steps=4, evaluate=None)


def test_nan_in_a_part_of_the_next_epoch_is_named() -> None:
    """Three batches an epoch, steps of two: the second step's second part lies in the next epoch."""
    source = Poisoned(batch=8, images=24)
    with pytest.raises(Diverged, match="in step 3: it began in the batch itself"):
        train(source=source, batch_size=16, accumulate=2, log_steps=1, evaluate=None)


def test_a_teacher_that_gives_nan_is_named() -> None:
    teacher = small_model()
    student = small_model(seed=1)
    torch.nn.init.constant_(teacher.blocks[1].mlp.fc1.weight, float("nan"))
    objective = Distillation(Teacher(teacher), student)
    with pytest.raises(Diverged, match="in step 1: it began in the teacher's answers"):
        train(student, objective=objective, evaluate=None)
