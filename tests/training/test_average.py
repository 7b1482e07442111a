"""The moving average of the weights, what is learnt from it, and BatchNorm's statistics."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.training.callbacks import Average, BatchNormStatistics
from linvit.training.config import Config
from linvit.training.contract import Task
from linvit.training.processes import Processes
from tests.training.toys import ToySource, cross_entropy, same, small_model, train, weights


def test_the_average_follows_by_its_formula() -> None:
    seen: list[dict[str, Tensor]] = []

    def watching(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        seen.append(weights(model))
        return cross_entropy(model, images, targets)

    made, _ = train(objective=watching, ema=0.8, ema_ramp=5.0, epochs=1)
    seen.append(weights(made.model))
    expected = {name: tensor.double() for name, tensor in seen[0].items()}
    for step, now in enumerate(seen[1:], start=1):
        decay = 0.8 * (1 - math.exp(-step / 5))
        expected = {name: decay * expected[name] + (1 - decay) * now[name] for name in now}
    for name, tensor in made.state.shown.state_dict().items():
        assert torch.allclose(tensor.double(), expected[name], atol=1e-6), name
    assert not same(weights(made.model), weights(made.state.shown))


def test_batch_norm_is_measured_again() -> None:
    model = small_model("qt")
    train(model, bn_images=32, epochs=1)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d))
    assert norm.momentum == 0.1 and int(norm.num_batches_tracked) == 4


def test_mesa_learns_from_the_average() -> None:
    records: list[dict[str, Any]] = []
    train(ema=0.5, mesa=2.0, mesa_start=0.5, log_steps=1, watch=records.append)
    mesa = [record["mesa"] for record in records if record["kind"] == "train"]
    assert mesa[:5] == [0] * 5 and min(mesa[5:]) > 0  # two steps of warm-up, and half of the six after it


def test_the_average_has_batch_norms_statistics_too() -> None:
    """As timm's: the statistics belong to the weights they were measured with."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    average = Average(model, 0.9, ramp=0)
    theirs = ModelEmaV3(model, decay=0.9)
    for step in range(1, 6):
        model(torch.randn(8, 3, 8, 8) * step)
        average.update(step)
        theirs.update(model)
    for name, tensor in average.model.state_dict().items():
        torch.testing.assert_close(tensor, theirs.module.state_dict()[name])
    assert not torch.equal(average.model[1].running_mean, model[1].running_mean)


def test_a_short_training_shows_what_it_learnt() -> None:
    """A decay for hundreds of thousands of steps would show the weights of the beginning."""
    average = Average(nn.Linear(2, 2), 0.99996)
    assert [average.decay_at(step) for step in (1, 90, 10**7)] == pytest.approx([2 / 11, 0.91, 0.99996])
    _, outcome = train(ema=0.99996, epochs=10)
    assert outcome.last["top1"] > 90


def test_batch_norm_is_measured_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(ToySource):
        def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Any:
            assert not mixed
            yield torch.tensor([[1.0, 2.0], [3.0, 6.0]])

    class Plain(Task):
        def forward(self, model: nn.Module, batch: Tensor) -> Any:
            return model(batch)

    processes = Processes("cpu")
    monkeypatch.setattr(processes, "mean", lambda statistic: statistic + 1)
    norm = nn.BatchNorm1d(2)
    BatchNormStatistics(Config(bn_images=1), Rows(), Plain(), processes).before_evaluation(norm)
    assert norm.running_mean.tolist() == [3, 5] and norm.running_var.tolist() == [3, 9]


def test_mesa_is_gone_after_a_run_that_failed() -> None:
    steps: list[int] = []

    def failing(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        steps.append(1)
        if len(steps) == 4:
            raise RuntimeError("a mistake")
        return cross_entropy(model, images, targets)

    model = small_model()
    with pytest.raises(RuntimeError, match="a mistake"):
        train(model, objective=failing, ema=0.5, mesa=1.0)
    assert not model._forward_hooks


def test_mesa_takes_outputs_with_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.inner(x))

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(images).logits, targets)}

    records: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"ema": 0.5, "mesa": 1.0, "mesa_start": 0, "log_steps": 1, "evaluate": None}
    train(Named(), objective=objective, watch=records.append, **settings)
    assert [record["mesa"] for record in records if record["kind"] == "train"][-1] > 0
