"""The grid: a comparison expanded to tasks, each with an identity and a key of its own.

Runs train a candidate with a seed, speeds time its structure, teachers are trained before those who learn from them.
Latency does not depend on the seed and wants the device for itself, hence tasks of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch

from linvit.attention import list_mechanisms, mechanism_class
from linvit.codec import from_plain, to_plain
from linvit.comparison.description.building import build_model
from linvit.comparison.description.candidates import chosen, name_of, paper_of, plan_of, read_candidate
from linvit.comparison.description.identity import DataDescription, describe_data, describe_teacher
from linvit.comparison.description.spec import OWN, Comparison
from linvit.comparison.description.task import Task
from linvit.comparison.results import (
    SOFTMAX,
    Candidate,
    DataSet,
    GivenTeacher,
    Identity,
    Label,
    SpeedIdentity,
    Structure,
    TrainedTeacher,
    TrainingIdentity,
)
from linvit.conversion.convert import own_size
from linvit.conversion.rebuilding import rebuild
from linvit.errors import LinvitError, unknown
from linvit.training.config import Config, override
from linvit.training.recipes import recipe as named_recipe

OWN_SIZES = {"fair": (4, 224), "vit": (16, 224)}  # patch and image size unless told


@dataclass(frozen=True)
class LeftOut:
    """A mechanism that `all` does not take, and why."""

    candidate: str
    patch: int | None
    size: int
    reason: str


def expand(comparison: Comparison, data: DataDescription | None = None) -> list[Task]:
    """All tasks: teachers, then runs with a candidate's seeds in a row, then speeds. `data` is what `describe_data`
    says, where it is known already."""
    return survey(comparison, data)[0]


def survey(comparison: Comparison, data: DataDescription | None = None) -> tuple[list[Task], list[LeftOut]]:
    """The tasks, and what `all` left out."""
    data = data or describe_data(comparison.data, comparison.root)
    found: dict[str, Task] = {}
    left_out: dict[LeftOut, None] = {}
    for part in comparison.parts():
        for task in Expansion(part, data, left_out).tasks():
            found.setdefault(task.key, task)
    if not found:
        raise LinvitError(f"nothing fits {comparison.architecture['model']}: {next(iter(left_out)).reason}")
    return in_order(found.values()), list(left_out)


def in_order(tasks: Iterable[Task]) -> list[Task]:
    """Teachers, runs, speeds; else as they come."""
    order = {"teacher": 0, "run": 1, "speed": 2}
    return sorted(tasks, key=lambda task: order[task.kind])


class Expansion:
    """One part of a comparison on its way to tasks."""

    def __init__(self, part: Comparison, data: DataDescription, left_out: dict[LeftOut, None]) -> None:
        self.part, self.data, self.left_out = part, data, left_out
        self.places = {"data": part.data, **({"root": part.root} if part.root else {})}
        self.teacher: GivenTeacher | None = None
        self.classes = data.classes
        self.own_patch: int | None = None
        self.architecture, self.own_size = self.read_architecture()
        self.config = make_config(part.recipe_name, self.model_name, part.settings)
        if part.mode == "scratch" and self.config.needs_teacher:
            raise LinvitError(f'recipe {part.recipe_name} learns from a teacher: set mode = "distil" or another recipe')
        if part.mode == "distil" and not self.config.needs_teacher:
            raise LinvitError(f"recipe {part.recipe_name} does not distil: use fast or mixa, or set distillation=soft")

    @property
    def model_name(self) -> str:
        return self.architecture["model"]

    def read_architecture(self) -> tuple[dict[str, Any], int]:
        """What every candidate is built from, and its own image size. A given teacher brings it along."""
        given = dict(self.part.architecture)
        size = None
        if self.part.teacher:
            self.teacher, config = describe_teacher(self.part.teacher)
            self.places["teacher"] = self.part.teacher
            if config is not None:
                given = {"model": config.model, **config.args}
                size = config.preprocessing.get("input_size", (None,))[-1]
            else:
                given = {"model": self.part.teacher}
        name, args = given["model"], {key: value for key, value in given.items() if key != "model"}
        if name in OWN:
            self.own_patch, size = OWN_SIZES[name]
            return to_plain({"model": name, **OWN[name], **args}), size
        if not self.part.teacher:
            args.setdefault("num_classes", self.data.classes)
        model = probe(name, args)
        patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
        self.own_patch = patch if isinstance(patch, int | None) else patch[0]
        self.classes = model.num_classes
        args.pop("num_classes", None)
        return to_plain({"model": name, **args}), size or own_size(model)[0]

    def tasks(self) -> Iterator[Task]:
        named, everything = chosen(self.part.plans)
        for patch in self.part.patch_sizes or (None,):
            for size in self.part.size or (self.own_size,):
                teacher = self.teacher_task(patch, size)
                if teacher is not None:
                    yield teacher
                for candidate in named:
                    reason = try_candidate(self.structure(candidate, patch, size))
                    if reason is not None:
                        raise LinvitError(f"{name_of(candidate)} does not fit {self.model_name}: {reason}")
                for candidate in [*named, *(self.others(named, patch, size) if everything else ())]:
                    yield from self.run_tasks(candidate, patch, size, teacher)
                    yield from self.speed_tasks(candidate, patch, size)

    def others(self, named: list[Candidate], patch: int | None, size: int) -> Iterator[Candidate]:
        """Every mechanism that fits and is not named."""
        for name in sorted(list_mechanisms(), key=lambda name: (name != "softmax", name)):
            candidate = read_candidate(name)
            if candidate in named:
                continue
            reason = self.misfit(candidate, patch, size)
            if reason is None:
                yield candidate
            else:
                self.left_out[LeftOut(name, patch or self.own_patch, size, reason)] = None

    def misfit(self, candidate: Candidate, patch: int | None, size: int) -> str | None:
        """Why a candidate does not fit the architecture; None if it does."""
        can = mechanism_class(candidate.name).capabilities
        if self.config.random_sizes and not can.any_tokens and not self.part.size:
            return "its number of tokens is fixed, and the recipe trains at several sizes"
        return try_candidate(self.structure(candidate, patch, size))

    def structure(self, candidate: Candidate, patch: int | None, size: int) -> Structure:
        patch = patch or (self.own_patch if self.model_name in OWN else None)
        return Structure(
            architecture=self.architecture, classes=self.classes, candidate=candidate, patch_size=patch, size=size
        )

    def run_tasks(self, candidate: Candidate, patch: int | None, size: int, teacher: Task | None) -> Iterator[Task]:
        """The candidate's training, once for each seed."""
        taught: TrainedTeacher | GivenTeacher | None = self.teacher
        if teacher is not None:
            assert isinstance(teacher.identity, TrainingIdentity)
            taught = TrainedTeacher(teacher.key, teacher.identity)
        for seed in self.part.seeds:
            config = replace(self.config, seed=seed)
            yield self.training("run", self.part.mode, candidate, patch, size, config, taught)

    def teacher_task(self, patch: int | None, size: int) -> Task | None:
        """The softmax model that the candidates learn from, where none is given."""
        if self.part.mode == "scratch" or self.part.teacher:
            return None
        config = make_config(self.part.teacher_recipe, self.model_name, self.part.teacher_settings)
        if config.needs_teacher:
            raise LinvitError(f"teacher_recipe {self.part.teacher_recipe} learns from a teacher itself: use deit")
        return self.training("teacher", "scratch", SOFTMAX, patch, size, config, None)

    def training(
        self,
        kind: str,
        mode: str,
        candidate: Candidate,
        patch: int | None,
        size: int,
        config: Config,
        teacher: TrainedTeacher | GivenTeacher | None,
    ) -> Task:
        """A task that trains by this recipe, at the grid's image size and no other."""
        identity = TrainingIdentity(
            **vars(self.structure(candidate, patch, size)),
            kind=kind,
            mode=mode,
            data=DataSet(self.data.name, self.data.digest),
            config=to_plain(replace(config, size=size, random_sizes=())),
            seed=config.seed,
            teacher=teacher,
        )
        label = label_of(candidate, patch or self.own_patch, size, mode, config.seed)
        return Task(identity, label, needs_of(identity), self.places)

    def speed_tasks(self, candidate: Candidate, patch: int | None, size: int) -> Iterator[Task]:
        measure = self.part.measure
        ladder = (size, 2 * size, 4 * size) if measure.size is None else measure.size
        if not ladder:
            return
        identity = SpeedIdentity(
            **vars(self.structure(candidate, patch, size)),
            ladder=ladder,
            batch=measure.batch,
            precision=measure.precision,
            compile=measure.compile,
            cuda_graph=measure.cuda_graph,
            devices=measure.devices,
        )
        yield Task(identity, label_of(candidate, patch or self.own_patch, size, self.part.mode), (), self.places)


def label_of(candidate: Candidate, patch: int | None, size: int, mode: str, seed: int | None = None) -> Label:
    name, paper = name_of(candidate), paper_of(candidate)
    return Label(candidate=name, mechanism=candidate.name, paper=paper, patch=patch, size=size, mode=mode, seed=seed)


def needs_of(identity: Identity) -> tuple[str, ...]:
    """What must be finished before this: the teacher that is trained first."""
    teacher = identity.teacher if isinstance(identity, TrainingIdentity) else None
    return (teacher.key,) if isinstance(teacher, TrainedTeacher) else ()


def make_config(recipe: str, model: str, settings: Iterable[str]) -> Config:
    return override(named_recipe(recipe, model), settings)


def probe(name: str, args: dict[str, Any]) -> Any:
    """A timm model without weights, to ask for its sizes."""
    if not timm.is_model(name):
        raise unknown("model", name, {*OWN, *timm.list_models()})
    with torch.device("meta"):
        return rebuild(name, args)


def try_candidate(structure: Structure) -> str | None:
    """Why this model cannot be built or called, in one line; None if it can. Nothing is computed for it."""
    try:
        with torch.no_grad(), torch.device("meta"):
            build_model(structure).eval()(torch.empty(1, 3, structure.size, structure.size))
    except (LinvitError, RuntimeError, AssertionError, ValueError, TypeError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def from_result(result: dict[str, Any], places: dict[str, str]) -> list[Task]:
    """The task that a result file tells of, after its teacher's where that is a run too."""
    try:
        speed = result["identity"]["kind"] == "speed"
        kind: type[Identity] = SpeedIdentity if speed else TrainingIdentity
        identity = from_plain(kind, result["identity"], "the identity")
        label = from_plain(Label, result["label"], "the label", ignore=True)
    except (KeyError, TypeError):
        raise LinvitError("this is no result file of a comparison") from None
    plan_of(identity.candidate)
    teachers = []
    if isinstance(identity, TrainingIdentity) and isinstance(identity.teacher, TrainedTeacher):
        taught = identity.teacher.identity
        teachers = [Task(taught, label_of(SOFTMAX, taught.patch_size, taught.size, "scratch", taught.seed), (), places)]
    return [*teachers, Task(identity, label, needs_of(identity), dict(places))]
