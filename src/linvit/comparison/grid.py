"""The grid: a comparison expanded to tasks, each with an identity and a key of its own.

Runs train a candidate with a seed, speeds time its structure, teachers are trained before those who learn from them.
Latency does not depend on the seed and wants the device for itself, hence tasks of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from shlex import quote
from typing import Any

import timm
import torch

from linvit.attention import list_mechanisms, mechanism_class
from linvit.codec import to_plain
from linvit.comparison.candidates import chosen, name_of, paper_of, plan_of, read_candidate
from linvit.comparison.identity import describe_data, describe_teacher, digest, key_of
from linvit.comparison.spec import OWN, Comparison
from linvit.conversion.convert import own_size
from linvit.conversion.rebuilding import rebuild
from linvit.errors import LinvitError, unknown
from linvit.training.config import Config, override
from linvit.training.recipes import recipe as named_recipe

OWN_SIZES = {"fair": (4, 224), "vit": (16, 224)}  # patch and image size unless told
SOFTMAX: dict[str, Any] = {"name": "softmax", "options": {}}
STRUCTURE = ("architecture", "classes", "candidate", "patch_size", "size")


@dataclass(frozen=True)
class Task:
    """One thing to do. `identity` is everything that determines its result; `places` says where this machine has what
    the identity names by digest (data, root, teacher), and is no part of the key."""

    kind: str  # teacher, run or speed
    key: str
    identity: dict[str, Any]
    candidate_key: str  # joins runs with speeds
    label: dict[str, Any]
    needs: tuple[str, ...] = ()  # keys of what must be finished first
    places: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """What does it again from its result file alone."""
        told = {name: place for name, place in self.places.items() if (name, place) != ("data", "digits")}
        flags = "".join(f" --{name} {quote(place)}" for name, place in told.items())
        return f"linvit compare {self.key}.json -o again{flags}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "needs": list(self.needs)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Task:
        return cls(**{**data, "needs": tuple(data["needs"])})


@dataclass(frozen=True)
class LeftOut:
    """A mechanism that `all` does not take, and why."""

    candidate: str
    patch: int | None
    size: int
    reason: str


def expand(comparison: Comparison, data: dict[str, Any] | None = None) -> list[Task]:
    """All tasks: teachers, then runs with a candidate's seeds in a row, then speeds. `data` is what `describe_data`
    says, where it is known already."""
    return survey(comparison, data)[0]


def survey(comparison: Comparison, data: dict[str, Any] | None = None) -> tuple[list[Task], list[LeftOut]]:
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

    def __init__(self, part: Comparison, data: dict[str, Any], left_out: dict[LeftOut, None]) -> None:
        self.part, self.data, self.left_out = part, data, left_out
        self.places = {"data": part.data, **({"root": part.root} if part.root else {})}
        self.teacher: dict[str, Any] | None = None
        self.classes: int = data["classes"]
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
            args.setdefault("num_classes", self.data["classes"])
        model = probe(name, args)
        patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
        self.own_patch = patch if isinstance(patch, int | None) else patch[0]
        self.classes = model.num_classes
        args.pop("num_classes", None)
        return to_plain({"model": name, **args}), size or own_size(model)[0]

    def tasks(self) -> Iterator[Task]:
        named, everything = chosen(self.part.candidates)
        for patch in self.part.patch_sizes or (None,):
            for size in self.part.sizes or (self.own_size,):
                teacher = self.teacher_task(patch, size)
                if teacher is not None:
                    yield teacher
                for candidate in named:
                    reason = try_candidate(self.structure(candidate, patch, size))
                    if reason is not None:
                        raise LinvitError(f"{name_of(candidate)} does not fit {self.model_name}: {reason}")
                for candidate in [*named, *(self.others(named, patch, size) if everything else ())]:
                    for seed in self.part.seeds:
                        yield self.run_task(candidate, patch, size, seed, teacher)
                    yield from self.speed_tasks(candidate, patch, size)

    def others(self, named: list[dict[str, Any]], patch: int | None, size: int) -> Iterator[dict[str, Any]]:
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

    def misfit(self, candidate: dict[str, Any], patch: int | None, size: int) -> str | None:
        """Why a candidate does not fit the architecture; None if it does."""
        can = mechanism_class(candidate["name"]).capabilities
        if self.config.random_sizes and not can.any_tokens and not self.part.sizes:
            return "its number of tokens is fixed, and the recipe trains at several sizes"
        return try_candidate(self.structure(candidate, patch, size))

    def structure(self, candidate: dict[str, Any], patch: int | None, size: int) -> dict[str, Any]:
        """What a candidate is as a model: the part of an identity that runs and speeds share."""
        return {
            "architecture": self.architecture,
            "classes": self.classes,
            "candidate": candidate,
            "patch_size": patch or (self.own_patch if self.model_name in OWN else None),
            "size": size,
        }

    def run_task(
        self, candidate: dict[str, Any], patch: int | None, size: int, seed: int, teacher: Task | None
    ) -> Task:
        taught: dict[str, Any] | None = self.teacher
        if teacher is not None:
            taught = {"key": teacher.key, "identity": teacher.identity}
        config = at_size(replace(self.config, seed=seed), size)
        needs = (teacher.key,) if teacher is not None else ()
        return self.trained("run", self.part.mode, candidate, patch, size, config, taught, needs)

    def teacher_task(self, patch: int | None, size: int) -> Task | None:
        """The softmax model that the candidates learn from, where none is given."""
        if self.part.mode == "scratch" or self.part.teacher:
            return None
        config = make_config(self.part.teacher_recipe, self.model_name, self.part.teacher_settings)
        if config.needs_teacher:
            raise LinvitError(f"teacher_recipe {self.part.teacher_recipe} learns from a teacher itself: use deit")
        return self.trained("teacher", "scratch", SOFTMAX, patch, size, at_size(config, size), None)

    def trained(
        self,
        kind: str,
        mode: str,
        candidate: dict[str, Any],
        patch: int | None,
        size: int,
        config: Config,
        teacher: dict[str, Any] | None,
        needs: tuple[str, ...] = (),
    ) -> Task:
        structure = self.structure(candidate, patch, size)
        identity = {
            "kind": kind,
            "mode": mode,
            **structure,
            "data": {"name": self.data["name"], "digest": self.data["digest"]},
            "config": config.to_dict(),
            "seed": config.seed,
            "teacher": teacher,
        }
        label = {**label_of(candidate, patch or self.own_patch, size), "seed": config.seed, "mode": mode}
        return Task(kind, key_of(identity), identity, digest(structure), label, needs, self.places)

    def speed_tasks(self, candidate: dict[str, Any], patch: int | None, size: int) -> Iterator[Task]:
        measure = self.part.measure
        ladder = [size, 2 * size, 4 * size] if measure.sizes is None else list(measure.sizes)
        if not ladder:
            return
        structure = self.structure(candidate, patch, size)
        identity = {
            "kind": "speed",
            **structure,
            "ladder": ladder,
            "batch": measure.batch,
            "precision": measure.precision,
            "compile": measure.compile,
            "cuda_graph": measure.cuda_graph,
            "devices": list(measure.devices),
        }
        label = {**label_of(candidate, patch or self.own_patch, size), "mode": self.part.mode}
        yield Task("speed", key_of(identity), identity, digest(structure), label, (), self.places)


def label_of(candidate: dict[str, Any], patch: int | None, size: int) -> dict[str, Any]:
    """What people call a candidate."""
    return {
        "candidate": name_of(candidate),
        "mechanism": candidate["name"],
        "paper": paper_of(candidate),
        "patch": patch,
        "size": size,
    }


def make_config(recipe: str, model: str, settings: Iterable[str]) -> Config:
    return override(named_recipe(recipe, model), settings)


def at_size(config: Config, size: int) -> Config:
    """The recipe at the grid's image size and no other."""
    return replace(config, size=size, random_sizes=())


def probe(name: str, args: dict[str, Any]) -> Any:
    """A timm model without weights, to ask for its sizes."""
    if not timm.is_model(name):
        raise unknown("model", name, {*OWN, *timm.list_models()})
    with torch.device("meta"):
        return rebuild(name, args)


def try_candidate(structure: dict[str, Any]) -> str | None:
    """Why this model cannot be built or called, in one line; None if it can. Nothing is computed for it."""
    from linvit.comparison.building import become, build_softmax

    size = structure["size"]
    shape = {"patch_size": structure["patch_size"], "size": size, "classes": structure["classes"]}
    try:
        with torch.no_grad(), torch.device("meta"):
            model = build_softmax(structure["architecture"], **shape)
            become(model, structure["candidate"], size=size)
            model.eval()(torch.empty(1, 3, size, size))
    except (LinvitError, RuntimeError, AssertionError, ValueError, TypeError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def from_result(result: dict[str, Any], places: dict[str, str]) -> list[Task]:
    """The task that a result file tells of, after its teacher's where that is a run too."""
    try:
        identity = result["identity"]
        structure = {name: identity[name] for name in STRUCTURE}
        taught = identity.get("teacher") or {}
        needs = (taught["key"],) if "identity" in taught else ()
        task = Task(
            identity["kind"], key_of(identity), identity, digest(structure), result["label"], needs, dict(places)
        )
        plan_of(identity["candidate"])
    except (KeyError, TypeError):
        raise LinvitError("this is no result file of a comparison") from None
    if not needs:
        return [task]
    label = {**label_of(SOFTMAX, identity["patch_size"], identity["size"]), "mode": "scratch"}
    label["seed"] = taught["identity"]["seed"]
    return [*from_result({"identity": taught["identity"], "label": label}, places), task]
