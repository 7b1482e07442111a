"""A model and data so small that a training takes a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.training.config import Config, Stage
from linvit.training.contract import Batch, Objective, Task
from linvit.training.engine.loop import Engine, Outcome, Output
from linvit.training.engine.phases import Phase
from linvit.training.processes import make_processes

SMALL = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
PLAIN = {"precision": "fp32", "batch_size": 8, "epochs": 2, "warmup_epochs": 0.5, "lr": 1e-2, "checkpoint_seconds": 1e9}


def small_model(plan: str | None = None, seed: int = 0, **args: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", **{**SMALL, **args})
    if plan:
        linvit.convert(model, plan, size=(8, 8))
    return model


class ToySource:
    """Four kinds of noisy pictures, in another order each epoch; every process has its share of each batch."""

    def __init__(self, batch: int = 8, images: int = 32, rank: int = 0, world: int = 1) -> None:
        draw = torch.Generator().manual_seed(7)
        self.labels = torch.arange(images) % 4
        centres = torch.randn(4, 3, 8, 8, generator=draw)
        self.pictures = centres[self.labels] + 0.5 * torch.randn(images, 3, 8, 8, generator=draw)
        self.batch, self.rank, self.world = batch, rank, world
        self.images, self.batches = images, images // (batch * world)

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(self.images, generator=torch.Generator().manual_seed(epoch))
        for step in range(skip, self.batches):
            start = (step * self.world + self.rank) * self.batch
            chosen = order[start : start + self.batch]
            yield self.pictures[chosen], self.labels[chosen]


def cross_entropy(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(images), targets)}


class Plain(Objective):
    """An objective from a function of a model, images and targets."""

    def __init__(self, function: Callable[..., dict[str, Tensor]]) -> None:
        self.function = function

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return self.function(model, *batch)


class Measured(Task):
    """A task whose metrics are a function's."""

    best = "top1"

    def __init__(self, function: Callable[[nn.Module], Mapping[str, float]]) -> None:
        self.function = function

    def metrics(self, model: nn.Module) -> Mapping[str, float]:
        return self.function(model)


def accuracy(model: nn.Module) -> Mapping[str, float]:
    source = ToySource()
    return {"top1": 100 * (model(source.pictures).argmax(-1) == source.labels).float().mean().item()}


def engine(
    model: nn.Module | None = None,
    folder: Path | None = None,
    source: Any = None,
    objective: Any = cross_entropy,
    stages: tuple[Stage, ...] = (),
    evaluate: Any = accuracy,
    watch: Any = None,
    models: bool = True,
    **settings: Any,
) -> Engine:
    config = Config(**{**PLAIN, **settings}, stages=stages)
    processes = make_processes(config, "cpu")
    if source is None:
        batch = config.batch_size // (config.accumulate * processes.world)
        source = ToySource(batch, rank=processes.rank, world=processes.world)
    objective = objective if isinstance(objective, Objective) else Plain(objective)
    phases = [Phase(stage, objective) for stage in config.plan_of_stages()]
    model = small_model() if model is None else model
    task = Measured(evaluate) if evaluate is not None else None
    return Engine(processes, model, config, source, phases, task=task, output=Output(folder, watch, models=models))


def callback(made: Engine, kind: type[Any]) -> Any:
    """The run's callback of this kind."""
    return next((callback for callback in made.callbacks if isinstance(callback, kind)), None)


def train(*args: Any, resume: bool = False, **kwargs: Any) -> tuple[Engine, Outcome]:
    made = engine(*args, **kwargs)
    return made, made.run(resume=resume)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
