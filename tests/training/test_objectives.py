"""From a config to phases: which stage learns what, and what happens before it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import linvit
from linvit.errors import LinvitError
from linvit.training.config import Config, override
from linvit.training.engine.loop import Engine, Output
from linvit.training.objectives.alignment import AttentionAlignment, FeatureAlignment
from linvit.training.objectives.distillation import Distillation, Supervised
from linvit.training.objectives.stages import make_phases
from linvit.training.processes import make_processes
from linvit.training.recipes import recipe
from tests.training.toys import Measured, ToySource, accuracy, same, small_model, weights

FAST = override(recipe("fast"), ["epochs=5", "batch_size=8", "precision=fp32", "mixup=0", "stages.features.fit=24"])


def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A teacher and its converted student."""
    teacher = small_model()
    student = copy.deepcopy(teacher)
    linvit.convert(student, "stella", size=(8, 8))
    return teacher, student


def test_stages_get_their_objectives() -> None:
    teacher, student = pair()
    phases = make_phases(FAST, student, teacher)
    assert [type(phase.objective) for phase in phases] == [AttentionAlignment, FeatureAlignment, Distillation]
    assert [phase.prepare is not None for phase in phases] == [False, True, False]
    (plain,) = make_phases(Config(loss="bce", label_smoothing=0.1), student)
    assert isinstance(plain.objective, Supervised) and plain.objective.smoothing == 0.1


def test_features_count_without_distillation_too() -> None:
    """And what is solved asks a teacher, whatever the loss is."""
    teacher, student = pair()
    batch = next(ToySource().epoch(0))
    config = override(FAST, ["distillation=none", "stages.align.epochs=0", "stages.features.epochs=0"])
    assert config.needs_teacher
    (phase,) = make_phases(config, student, teacher)
    found = phase.objective(student, batch)
    torch.testing.assert_close(found["loss"], found["labels"] + 0.1 * found["features"])
    assert override(Config(), ["distillation=none"]).needs_teacher is False


def test_a_teacher_is_needed() -> None:
    with pytest.raises(LinvitError, match="recipe fast learns from a teacher"):
        make_phases(FAST, small_model("stella"))


def run(folder: Path | None, student: torch.nn.Module, teacher: torch.nn.Module, **options: bool) -> Engine:
    phases, processes = make_phases(FAST, student, teacher), make_processes(FAST, "cpu")
    task, output = Measured(accuracy), Output(folder)
    made = Engine(processes, student, FAST, ToySource(), phases, task=task, output=output)
    made.run(**options)
    return made


def test_projections_are_solved_before_the_stage_begins(tmp_path: Path) -> None:
    teacher, student = pair()
    batch = next(ToySource().epoch(0))
    align, features, finetune = make_phases(FAST, student, teacher)
    assert features.prepare is not None and align.prepare is None and finetune.prepare is None
    before, error = weights(student), features.objective(student, batch)["features"].item()
    features.prepare(ToySource().epoch(0))
    moved = {name for name, tensor in weights(student).items() if not torch.equal(tensor, before[name])}
    maps = [f"blocks.{i}.{name}" for i in range(2) for name in ("attn.proj", "mlp.fc2")]
    assert moved == {f"{name}.{part}" for name in maps for part in ("weight", "bias")}
    assert features.objective(student, batch)["features"].item() < error
    whole = run(tmp_path, pair()[1], teacher)
    again = run(tmp_path, pair()[1], teacher, resume=True)
    assert same(weights(whole.model), weights(again.model)), "and not again when a run goes on"
