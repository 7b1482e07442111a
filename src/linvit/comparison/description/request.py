"""From what a user asks for (a preset, a file, a result to repeat, or what the store was asked before) to the grid of
jobs, each with an identity and a key of its own.

Runs train a candidate with a seed, speeds time its structure, teachers are trained before those who learn from them.
Latency does not depend on the seed and wants the device for itself, hence jobs of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import timm
import torch

from linvit.attention import list_mechanisms, mechanism_class
from linvit.codec import from_plain, to_plain
from linvit.comparison import results
from linvit.comparison.description.building import (
    build_softmax,
    name_of,
    patch_of,
    plan_of,
    read_candidate,
    try_candidate,
)
from linvit.comparison.description.dense import describe, read_dense
from linvit.comparison.description.job import DataDescription, Job, describe_teacher
from linvit.comparison.description.spec import ALL, OWN, Comparison, Part, load
from linvit.comparison.files import parse_object
from linvit.comparison.results import SOFTMAX, Candidate, Label, Structure, TrainedTeacher
from linvit.conversion.convert import own_size
from linvit.conversion.rebuilding import rebuild
from linvit.errors import LinvitError, unknown
from linvit.models.dense import HEADS
from linvit.training import Config, override
from linvit.training import recipe as named_recipe

OWN_SIZES = {"fair": (4, 224), "vit": (16, 224)}  # patch and image size unless told
OWN_SIZE = 512  # of the images of detectors and segmenters, where the recipe has none either
PLACES = {"data", "root", "teacher", "backbone"}  # what may lie elsewhere on another machine


@dataclass
class Request:
    """The jobs of one command, what `all` left out, and what is known of the data, by digest."""

    jobs: list[Job] = field(default_factory=list)
    left_out: "list[LeftOut]" = field(default_factory=list)
    data: dict[str | None, DataDescription] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)


def read_request(
    source: str | Comparison, changes: dict[str, Any], asked: Sequence[Comparison] = (), *, guess: bool = False
) -> Request:
    """What is asked for: by a preset, a file or a comparison; without any, what the store was `asked` before. `changes`
    are fields that the command line sets. With `guess`, data need not be there."""
    if isinstance(source, str) and source.endswith(".json"):
        return repeat(Path(source), changes)
    request = Request(comparisons=comparisons_of(source, changes, asked))
    found: dict[str, Job] = {}
    for comparison in request.comparisons:
        try:
            facts = describe(comparison.data, comparison.root, comparison.head, comparison.task)
        except LinvitError:
            if not guess:
                raise
            facts = DataDescription(comparison.data, None, classes=1000, train=None, validation=None)
        request.data[facts.digest] = facts
        jobs, left_out = survey(comparison, facts)
        found = {**{job.key: job for job in jobs}, **found}
        request.left_out += [row for row in left_out if row not in request.left_out]
    request.jobs = in_order(found.values())
    return request


def comparisons_of(source: str | Comparison, changes: dict[str, Any], asked: Sequence[Comparison]) -> list[Comparison]:
    """The named comparison, with what the command line says in all its parts; settings add to those of the file.
    Without a name, what the store was asked, else one made of the flags alone."""
    if source:
        comparison = source if isinstance(source, Comparison) else load(source)
        told = {name for name in changes if name in {f.name for f in fields(Part)}} - {"settings"}
        nothing: dict[str, Any] = dict.fromkeys(told)
        also = tuple(replace(part, **nothing) for part in comparison.also)
        settings = (*comparison.settings, *changes.get("settings", ()))
        return [changed(comparison, {**changes, "settings": settings, "also": also})]
    if asked and changes.keys() <= PLACES:
        return [changed(comparison, changes) for comparison in asked]
    if not changes:
        raise LinvitError("say what to compare: a preset (linvit compare digits -o STORE), a file, or flags")
    return [changed(Comparison(), changes)]


def changed(comparison: Comparison, changes: dict[str, Any]) -> Comparison:
    """A comparison with other values of its fields; a backbone is the architecture's."""
    changes = dict(changes)
    if "backbone" in changes:
        architecture = changes.get("architecture", comparison.architecture)
        changes["architecture"] = {**architecture, "backbone": changes.pop("backbone")}
    return replace(comparison, **changes)


def repeat(path: Path, changes: dict[str, Any]) -> Request:
    """The job of a result file once more; of the rest only the places may differ."""
    try:
        result = parse_object(path.read_bytes())
    except (OSError, LinvitError) as error:
        raise LinvitError(f"cannot read {path}: {error}") from None
    if beyond := sorted(changes.keys() - PLACES):
        raise LinvitError(f"{path.name} says what is repeated: {', '.join(beyond)} cannot be changed")
    jobs = from_result(result, changes, str(path))
    if jobs[-1].kind == "speed":
        return Request(jobs)
    wanted, places = jobs[-1].training.data, jobs[-1].places
    facts = describe(places["data"], places.get("root", ""), jobs[-1].identity.head, jobs[-1].training.task)
    if facts.digest != wanted.digest:
        raise LinvitError(f"{facts.name} is not the set of {path.name}: give --data {wanted.name}, the same one")
    return Request(jobs, data={facts.digest: facts})


def pick(jobs: Sequence[Job], keys: Sequence[str]) -> list[Job]:
    """Only the jobs whose keys begin so, and what they need."""
    if not keys:
        return list(jobs)
    for key in keys:
        if not any(job.key.startswith(key) for job in jobs):
            raise LinvitError(f"no job has the key {key}: --dry-run --json shows them all")
    chosen = [job for job in jobs if job.key.startswith(tuple(keys))]
    needed = {key for job in chosen for key in job.needs}
    return [job for job in jobs if job in chosen or job.key in needed]


@dataclass(frozen=True)
class LeftOut:
    """A mechanism that `all` does not take, and why."""

    candidate: str
    patch: int | None
    size: int
    reason: str


def survey(comparison: Comparison, data: DataDescription | None = None) -> tuple[list[Job], list[LeftOut]]:
    """All jobs: teachers, then runs with a candidate's seeds in a row, then speeds; and what `all` left out. `data` is
    what `describe_data` says, where it is known already."""
    data = data or describe(comparison.data, comparison.root, comparison.head, comparison.task)
    found: dict[str, Job] = {}
    left_out: dict[LeftOut, None] = {}
    for part in comparison.parts():
        for job in Expansion(part, data, left_out).jobs():
            found.setdefault(job.key, job)
    if not found:
        raise LinvitError(f"nothing fits {comparison.architecture['model']}: {next(iter(left_out)).reason}")
    return in_order(found.values()), list(left_out)


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Teachers, runs, speeds; else as they come."""
    return sorted(jobs, key=lambda job: ("teacher", "run", "speed").index(job.kind))


class Expansion:
    """One part of a comparison on its way to jobs."""

    def __init__(self, part: Comparison, data: DataDescription, left_out: dict[LeftOut, None]) -> None:
        self.comparison, self.data, self.left_out = part, data, left_out
        self.places = {"data": part.data, **({"root": part.root} if part.root else {})}
        self.teacher: results.Named | TrainedTeacher | None = None
        self.classes = data.classes
        self.own_patch: int | None = None
        self.architecture, size = self.read_architecture()
        self.model_name: str = self.architecture["model"]
        self.task = HEADS[self.model_name].task if self.model_name in HEADS else "classify"
        self.config = override(self.recipe(part.recipe_name, part.task), part.settings)
        self.own_size = size or self.config.size or OWN_SIZE
        if part.mode == "scratch" and self.config.needs_teacher:
            raise LinvitError(f'recipe {part.recipe_name} learns from a teacher: set mode = "distil" or another recipe')
        if part.mode == "distil" and not self.config.needs_teacher:
            raise LinvitError(f"recipe {part.recipe_name} does not distil: use fast or mixa, or set distillation=soft")

    def recipe(self, name: str, task: str = "") -> Config:
        return named_recipe(name, self.model_name, task or self.task)

    def read_architecture(self) -> tuple[dict[str, Any], int | None]:
        """What every candidate is built from, and its own image size; of a detector or segmenter only a teacher has
        one. A given teacher brings the architecture along."""
        args, size = dict(self.comparison.architecture), None
        if self.comparison.teacher:
            self.teacher, config = describe_teacher(self.comparison.teacher)
            self.places["teacher"] = self.comparison.teacher
            if args["model"] in HEADS and not self.comparison.head:
                raise LinvitError(
                    f"{self.comparison.teacher} is no {args['model']}: give a folder that linvit saved one in"
                )
            args = {"model": self.comparison.teacher}
            if config is not None:
                args = {"model": config.model, **config.args}
                size = config.preprocessing.get("input_size", (None,))[-1]
        if args["model"] in HEADS:
            return self.read_head(args), size
        name = args.pop("model")
        if name in OWN:
            self.own_patch, size = OWN_SIZES[name]
            return to_plain({"model": name, **OWN[name], **args}), size
        if not timm.is_model(name):
            raise unknown("model", name, {*OWN, *timm.list_models()})
        if "backbone" in args:
            raise LinvitError(f"{name} has no backbone: give a head as the model ({', '.join(HEADS)})")
        if not self.comparison.teacher:
            args.setdefault("num_classes", self.data.classes)
        with torch.device("meta"):
            model: Any = rebuild(name, args)
        self.own_patch, self.classes = patch_of(model), model.num_classes
        args.pop("num_classes", None)
        return to_plain({"model": name, **args}), size or own_size(model)[0]

    def read_head(self, args: dict[str, Any]) -> dict[str, Any]:
        """The same of a detector or segmenter."""
        if self.comparison.patch_size:
            raise LinvitError("patch_size are of classifiers: give backbone_args = {patch_size = …}")
        if self.comparison.teacher:
            self.classes = args["num_classes"]
        architecture, folder = read_dense(args)
        self.places |= {"backbone": folder} if folder else {}
        with torch.device("meta"):
            softmax = Structure(
                architecture=architecture, classes=self.classes, candidate=SOFTMAX, patch_size=None, size=OWN_SIZE
            )
            self.own_patch = patch_of(build_softmax(softmax))
        return architecture

    def jobs(self) -> Iterator[Job]:
        named: dict[str, Candidate] = {}
        for candidate in (read_candidate(text) for text in self.comparison.plans if text.strip() != ALL):
            named.setdefault(name_of(candidate), candidate)
        everything = any(text.strip() == ALL for text in self.comparison.plans)
        for patch in self.comparison.patch_size or (self.own_patch if self.model_name in OWN else None,):
            for size in self.comparison.size or (self.own_size,):
                softmax = Structure(
                    architecture=self.architecture, classes=self.classes, candidate=SOFTMAX, patch_size=patch, size=size
                )
                yield from self.teachers(softmax)
                wanted = [replace(softmax, candidate=candidate) for candidate in named.values()]
                for structure in wanted:
                    reason = try_candidate(structure)
                    if reason is not None:
                        raise LinvitError(f"{name_of(structure.candidate)} does not fit {self.model_name}: {reason}")
                for structure in [*wanted, *(self.others(softmax, wanted) if everything else ())]:
                    for seed in self.comparison.seeds:
                        yield self.training("run", self.comparison.mode, structure, replace(self.config, seed=seed))
                    yield from self.speeds(structure)

    def teachers(self, softmax: Structure) -> Iterator[Job]:
        """The softmax model that the candidates learn from, where none is given."""
        if self.comparison.mode == "scratch" or self.comparison.teacher:
            return
        if not self.classes:
            raise LinvitError(f"{self.data.name} has no labels to train a teacher with: give teacher = … (--teacher)")
        name = self.comparison.teacher_recipe_name
        config = override(self.recipe(name), self.comparison.teacher_settings)
        if config.needs_teacher:
            raise LinvitError(f"teacher_recipe {name} learns from a teacher itself: use {self.comparison.plain_recipe}")
        self.teacher = None
        job = self.training("teacher", "scratch", softmax, config)
        self.teacher = TrainedTeacher(job.key, job.training)
        yield job

    def others(self, softmax: Structure, wanted: list[Structure]) -> Iterator[Structure]:
        """Every mechanism that fits and is not named."""
        for name in sorted(list_mechanisms(), key=lambda name: (name != "softmax", name)):
            structure = replace(softmax, candidate=read_candidate(name))
            if structure in wanted:
                continue
            if self.config.sides and not mechanism_class(name).capabilities.any_tokens and not self.comparison.size:
                reason: str | None = "its number of tokens is fixed, and the recipe trains at several sizes"
            else:
                reason = try_candidate(structure)
            if reason is None:
                yield structure
            else:
                patch = softmax.patch_size or self.own_patch
                self.left_out[LeftOut(name, patch, softmax.size, reason)] = None

    def training(self, kind: str, mode: str, structure: Structure, config: Config) -> Job:
        """A job that trains by this recipe, at the grid's image size and no other."""
        identity = results.TrainingIdentity(
            **vars(structure),
            kind=kind,
            mode=mode,
            data=results.Named(self.data.name, self.data.digest),
            config=to_plain(replace(config, size=structure.size, random_sizes=())),
            seed=config.seed,
            teacher=self.teacher,
            task=self.comparison.task if kind == "run" else "",
        )
        return Job(identity, label_of(structure, mode, config.seed, self.own_patch), self.places)

    def speeds(self, structure: Structure) -> Iterator[Job]:
        """The candidate's timing, where there is one."""
        how = dict(vars(self.comparison.measure))
        ladder = how.pop("size")
        if ladder is None:
            ladder = (structure.size, 2 * structure.size, 4 * structure.size)
        if ladder:
            identity = results.SpeedIdentity(**vars(structure), ladder=ladder, **how)
            yield Job(identity, label_of(structure, self.comparison.mode, None, self.own_patch), self.places)


def label_of(structure: Structure, mode: str, seed: int | None, own_patch: int | None = None) -> Label:
    """What people call a structure; the paper is that of the candidate's main mechanism."""
    candidate = structure.candidate
    main = plan_of(candidate).default
    return Label(
        candidate=name_of(candidate),
        mechanism=candidate.name,
        paper=mechanism_class(main.mechanism).paper if main is not None else "",
        patch=structure.patch_size or own_patch,
        size=structure.size,
        mode=mode,
        seed=seed,
    )


def from_result(result: Any, places: dict[str, str], source: str = "this") -> list[Job]:
    """The job that a result file tells of, after its teacher's where that is a run too. The set's place is its name,
    unless `places` has another."""
    try:
        speed = result["identity"]["kind"] == "speed"
        kind: type[results.Identity] = results.SpeedIdentity if speed else results.TrainingIdentity
        identity = from_plain(kind, result["identity"], "the identity")
        label = from_plain(Label, result["label"], "the label", ignore=True)
    except (KeyError, TypeError):
        raise LinvitError(f"{source} is no result file of a comparison") from None
    plan_of(identity.candidate)
    if isinstance(identity, results.SpeedIdentity):
        return [Job(identity, label, {"data": "digits", **places})]
    places = {"data": identity.data.name, **places}
    jobs = [Job(identity, label, places)]
    if isinstance(identity.teacher, TrainedTeacher):
        taught = identity.teacher.identity
        jobs.insert(0, Job(taught, label_of(taught, "scratch", taught.seed), places))
    return jobs
