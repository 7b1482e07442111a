"""From a config to what its stages minimise."""

from functools import partial
from typing import Any

from torch import nn

from linvit.errors import LinvitError
from linvit.training.config import Config, Stage
from linvit.training.contract import Objective, blocks_around_hosts
from linvit.training.engine.phases import Phase
from linvit.training.objectives.alignment import AttentionAlignment, FeatureAlignment, hosts_to_align
from linvit.training.objectives.dense import InBody, MapAlignment, ModelLosses, body
from linvit.training.objectives.distillation import Distillation, Supervised
from linvit.training.objectives.final import FinalAlignment, Reader
from linvit.training.objectives.least_squares import fit_projections
from linvit.training.objectives.teacher import Teacher
from linvit.training.processes import LOWERED


def make_phases(
    config: Config,
    student: nn.Module,
    teacher: nn.Module | None = None,
    *,
    labelled: bool = True,
    reader: Reader | None = None,
) -> list[Phase]:
    """Every stage with its objective. The teacher computes in the student's precision."""
    if config.needs_teacher and teacher is None:
        raise LinvitError(f"recipe {config.recipe} learns from a teacher: give one, or set distillation=none")
    if teacher is student:
        raise LinvitError("the teacher is the student itself: give a copy of it, made before the training")
    asked = Teacher(teacher, student=student, precision=LOWERED.get(config.precision)) if teacher else None
    phases = []
    for stage in config.plan_of_stages():
        solve = partial(fit_projections, asked, student, images=stage.fit) if asked is not None and stage.fit else None
        phases.append(Phase(stage, make_objective(config, stage, student, asked, labelled, reader), solve))
    return phases


def make_dense_phases(config: Config, student: nn.Module, teacher: nn.Module | None = None) -> list[Phase]:
    """Every stage of a detector's or segmenter's training. The teacher is the model before its conversion."""
    if config.needs_teacher and teacher is None:
        raise LinvitError(
            f"recipe {config.recipe} learns from the original: give --plan, or a recipe without a teacher"
        )
    if config.distillation != "none":
        raise LinvitError(f"distillation={config.distillation} is for classifiers: a detector or segmenter learns maps")
    if any(stage.objective == "final" for stage in config.stages):
        raise LinvitError(
            "objective final is of backbones: a detector or segmenter aligns its maps, objective features"
        )
    asked = None
    if teacher is not None:
        asked = Teacher(body(teacher), precision=LOWERED.get(config.precision))
    phases = []
    for stage in config.plan_of_stages():
        solve = None
        if asked is not None and stage.fit:
            solve = partial(fit_projections, asked, body(student), images=stage.fit)
        objective: Objective
        if stage.objective == "supervised" or asked is None:
            objective = ModelLosses(student, asked if stage.features else None, stage.features)
        elif stage.objective == "alignment":
            objective = InBody(AttentionAlignment(asked, body(student), inputs=stage.inputs))
        else:
            objective = InBody(MapAlignment(asked, body(student)))
        phases.append(Phase(stage, objective, solve))
    return phases


def make_objective(
    config: Config,
    stage: Stage,
    student: nn.Module,
    teacher: Teacher | None,
    labelled: bool,
    reader: Reader | None = None,
) -> Objective:
    if stage.objective == "alignment" and teacher is not None:
        return AttentionAlignment(teacher, student, inputs=stage.inputs)
    if stage.objective == "features" and teacher is not None:
        return FeatureAlignment(teacher, student, logits=stage.logits, temperature=config.temperature)
    if stage.objective == "final" and teacher is not None:
        return FinalAlignment(teacher, student, blocks=stage.features, reader=reader)
    supervised = Supervised(config.loss, smoothing=config.label_smoothing)
    plain = config.distillation == "none"
    if teacher is None or (plain and not stage.features):
        return supervised
    how: dict[str, Any] = {"kind": "soft", "weight": 0.0}  # nothing but the features is learnt from the teacher
    if not plain:
        how = {"kind": config.distillation, "weight": config.distillation_weight}
    if stage.features:
        hosts_to_align(teacher.model, student)  # an error where the two are not one architecture
        how |= {"features": blocks_around_hosts(student), "feature_weight": stage.features}
    how |= {"temperature": config.temperature, "supervised": supervised, "labelled": labelled}
    return Distillation(teacher, student, **how)
