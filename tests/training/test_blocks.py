"""Steps compiled block by block: one graph for all blocks, the same training, and nothing left behind."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from linvit.training.config import Config, Stage
from linvit.training.engine.loop import Engine
from linvit.training.objectives.stages import make_phases
from linvit.training.processes import make_processes
from tests.training.toys import PLAIN, Measured, ToySource, accuracy, small_model, weights

SETTINGS: dict[str, Any] = {**PLAIN, "distillation": "soft", "epochs": 1, "eval_epochs": 0.5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's front half alone: what is compiled is its business, how well is not."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()


def trained(plan: str, compile: str, stage: Stage) -> nn.Module:
    teacher, student = small_model(depth=3), small_model(plan, depth=3)
    config = Config(**{**SETTINGS, "compile": compile, "stages": (stage,)})
    phases = make_phases(config, student, copy.deepcopy(teacher))
    engine = Engine(make_processes(config, "cpu"), student, config, ToySource(), phases, task=Measured(accuracy))
    engine.run()
    assert not any("forward" in vars(module) for module in student.modules())
    return student


STAGES = {
    "supervised": Stage("one", "supervised", 1),
    "with features": Stage("one", "supervised", 1, features=0.5),
    "features": Stage("one", "features", 1, logits=1.0),
    "alignment": Stage("one", "alignment", 1),
    "alignment, student": Stage("one", "alignment", 1, inputs="student"),
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_graph_for_the_student_the_teacher_and_the_distance_between_them(stage: Stage) -> None:
    plain = trained("stella", "off", stage)
    assert counters["stats"]["unique_graphs"] == 0
    compiled = trained("stella", "blocks", stage)
    assert (
        counters["stats"]["unique_graphs"] == (2 if stage == STAGES["supervised"] else 3)
        and not counters["graph_break"]
    )
    for name, ours in weights(compiled).items():
        torch.testing.assert_close(ours, weights(plain)[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("plan", ["castling", "qt", "mobile", "xca", "relu_quadratic"])
def test_every_kind_of_block_repeats(plan: str) -> None:
    trained(plan, "blocks", STAGES["supervised"])
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
