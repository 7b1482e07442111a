"""Runs that differ by their seed only make one row: means, intervals, the difference to softmax, and speeds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from linvit.codec import digest, to_plain
from linvit.comparison.description.task import counted_config
from linvit.comparison.results import (
    Conversion,
    Drift,
    Label,
    Run,
    Speed,
    SpeedPoint,
    TrainedTeacher,
    Training,
    TrainingIdentity,
)
from linvit.comparison.statistics.estimates import (
    Difference,
    Estimate,
    Fit,
    average,
    difference,
    estimate,
    fit_exponent,
)
from linvit.comparison.statistics.reading import Results

T = TypeVar("T")
BASELINE = "softmax"
MODES = {"scratch": "Trained from scratch", "distil": "Distilled from softmax"}
OWN = ("seed", "teacher", "input_size", "eval_epochs")  # of a recipe's config: what runs of one setting may differ in


@dataclass(frozen=True)
class Ladder:
    """A candidate on one chip, in one pass, one image at a time or many: its ladder and how it grows."""

    device: str
    chip: str  # and how it was used: what a time must not be compared without
    what: str
    many: bool  # the batch of throughput, not one image
    points: tuple[SpeedPoint, ...]  # by tokens
    time: Fit | None
    memory: Fit | None

    def same_clock(self, other: Ladder) -> bool:
        """Whether two candidates were timed on the same chip in the same way."""
        ours, theirs = ((s.chip, s.what, s.many) for s in (self, other))
        return ours == theirs


@dataclass(frozen=True)
class CurvePoint:
    """Top-1 after an epoch: the mean, the least and the greatest over the seeds."""

    epoch: float
    mean: float
    low: float
    high: float


@dataclass(eq=False)
class CandidateRow:
    """A candidate at one patch size and resolution, in one setting."""

    runs: list[Run]
    is_teacher: bool = False
    baseline: CandidateRow | None = None
    against: str = BASELINE  # or the teacher, where softmax was not distilled
    top1: Estimate = field(init=False)
    delta: Difference | None = None
    ladders: list[Ladder] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs.sort(key=lambda run: run.seed)
        self.top1 = estimate([run.top1 for run in self.runs])

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def label(self) -> Label:
        return self.first.label

    @property
    def patch(self) -> int:
        """0 where the architecture's own is not known."""
        return self.label.patch or 0

    @property
    def name(self) -> str:
        return f"{self.label.candidate} (teacher)" if self.is_teacher else self.label.candidate

    @property
    def place(self) -> tuple[int, int, str]:
        """Rows of one place are compared with each other: patch, resolution, teacher."""
        return self.patch, self.label.size, teacher_of(self.first.identity)

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    def at(self, seed: int) -> float:
        """Top-1 of one seed."""
        return next(run.top1 for run in self.runs if run.seed == seed)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of top-1: over seeds, or over images where there is a single seed."""
        error = self.first.accuracy.standard_error
        if self.top1.interval is not None or error is None:
            return self.top1.interval
        return self.top1.mean - 1.96 * error, self.top1.mean + 1.96 * error

    def mean(self, of: Callable[[Run], float | None]) -> float | None:
        """The mean over seeds of a number of the runs."""
        return average(of(run) for run in self.runs)

    @property
    def conversion(self) -> Conversion | None:
        """Means over seeds; None where nothing was converted."""
        found = [run.conversion for run in self.runs if run.conversion is not None]
        return mean_of(found) if found else None

    @property
    def training(self) -> Training:
        """Means over seeds."""
        return mean_of([run.training for run in self.runs])

    def drift(self, dtype: str) -> Drift | None:
        """Half precision: means over seeds, finite only if all are."""
        found = [d for run in self.runs for d in run.drift if d.dtype == dtype and d.finite is not None]
        return replace(mean_of(found), finite=all(d.finite for d in found)) if found else None

    def curve(self) -> list[CurvePoint]:
        at: dict[float, list[float]] = defaultdict(list)
        for run in self.runs:
            for epoch in run.accuracy.epochs:
                at[float(epoch.epoch)].append(epoch.top1)
        return [CurvePoint(e, float(np.mean(found)), min(found), max(found)) for e, found in sorted(at.items())]


def mean_of(records: Sequence[T]) -> T:
    """A record with the means of these records' numbers; of the rest the first one's."""
    first, means = records[0], {}
    for name in (f.name for f in fields(first)):  # type: ignore[arg-type]
        values = [getattr(record, name) for record in records]
        if any(type(value) in (int, float) for value in values):
            means[name] = average(values)
    return replace(first, **means)  # type: ignore[type-var]


@dataclass(frozen=True)
class Setting:
    """What the compared runs have in common."""

    key: str
    title: str
    mode: str
    rows: tuple[CandidateRow, ...]


def settings(results: Results) -> list[Setting]:
    """All rows, grouped by what is compared with what; the largest comparison first."""
    groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in results.runs:
        group = groups[setting_of(run), run.candidate_key, teacher_of(run.identity)]
        if run.seed in {other.seed for other in group}:
            results.notes.append(
                f"Run {run.key} repeats seed {run.seed} of {run.label.candidate}; the first one counts."
            )
        else:
            group.append(run)
    by_setting: dict[str, list[CandidateRow]] = defaultdict(list)
    for (setting, _, _), runs in groups.items():
        by_setting[setting].append(CandidateRow(runs))
    for rows in by_setting.values():
        add_teachers(rows, results)
        add_differences(rows)
    add_ladders([row for rows in by_setting.values() for row in rows], results.speeds)
    made = [Setting(key, title(rows), rows[0].label.mode, tuple(rows)) for key, rows in by_setting.items()]
    made.sort(key=lambda setting: (-sum(not row.is_teacher for row in setting.rows), setting.mode != "scratch"))
    for tell in (teacher_seed, lambda setting: f" ({setting.key[:4]})"):
        titles = [setting.title for setting in made]
        made = [
            replace(setting, title=setting.title + tell(setting)) if titles.count(setting.title) > 1 else setting
            for setting in made
        ]
    return made


def setting_of(run: Run) -> str:
    """A digest of what all runs that are compared with each other have in common."""
    identity = run.identity
    common = {
        "mode": run.label.mode,
        "architecture": identity.architecture,
        "data": identity.data.digest or run.data.digest,
        "config": shared_config(identity),
        "teacher": school(identity),
    }
    return digest(common)


def shared_config(identity: TrainingIdentity) -> dict[str, Any]:
    """What the runs of one setting have in common of their recipe; fields that came later stand for their defaults."""
    return {name: value for name, value in counted_config(identity.config).items() if name not in OWN}


def school(identity: TrainingIdentity) -> Any:
    """How a teacher came about. Candidates of one setting may have several, one for each patch and resolution."""
    if not isinstance(identity.teacher, TrainedTeacher):
        return teacher_of(identity)
    trained = identity.teacher.identity
    return [trained.architecture, trained.seed, shared_config(trained)]


def teacher_of(identity: TrainingIdentity) -> str:
    """The key of the teacher's run, or what else tells one teacher from another; empty from scratch."""
    teacher = identity.teacher
    if teacher is None:
        return ""
    return teacher.key if isinstance(teacher, TrainedTeacher) else digest(to_plain(teacher))


def teacher_seed(setting: Setting) -> str:
    teacher = setting.rows[0].first.identity.teacher
    return f", teacher of seed {teacher.identity.seed}" if isinstance(teacher, TrainedTeacher) else ""


def title(rows: Sequence[CandidateRow]) -> str:
    run = rows[0].first
    model, config = run.identity.architecture.get("model"), run.identity.config
    words = [f"{MODES.get(run.label.mode, run.label.mode)} on {run.data.name}"]
    words += [str(model)] if model else []
    words += [f"recipe {config['recipe']}"] if config.get("recipe") else []
    words += [f"{config['epochs']:g} epochs"] if isinstance(config.get("epochs"), int | float) else []
    return ", ".join(words)


def add_teachers(rows: list[CandidateRow], results: Results) -> None:
    """A teacher that was trained as part of the comparison stands beside those that learnt from it."""
    for key in sorted({teacher_of(row.first.identity) for row in rows} & set(results.teachers)):
        rows.append(CandidateRow([results.teachers[key]], is_teacher=True))


def add_differences(rows: Sequence[CandidateRow]) -> None:
    places = {row.place: row for row in rows if row.label.candidate == BASELINE and not row.is_teacher}
    teachers = {row.first.key: row for row in rows if row.is_teacher}
    for row in rows:
        base = places.get(row.place) or teachers.get(teacher_of(row.first.identity))
        if base is row or row.is_teacher:
            continue
        if base is None:
            add_difference_to_teacher(row)
            continue
        row.baseline, row.against = base, "the teacher" if base.is_teacher else BASELINE
        row.delta = paired(row, base)


def paired(row: CandidateRow, base: CandidateRow) -> Difference | None:
    """How much better a row is than another, seed by seed and image by image."""
    theirs = {run.seed: run for run in base.runs}
    if base.is_teacher:  # one teacher, whatever the seed of those that learnt from it
        theirs = dict.fromkeys(row.seeds, base.first)
    return difference(
        {run.seed: run.top1 for run in row.runs},
        {seed: run.top1 for seed, run in theirs.items()},
        {run.seed: run.right for run in row.runs if run.right is not None},
        {seed: run.right for seed, run in theirs.items() if run.right is not None},
    )


def add_difference_to_teacher(row: CandidateRow) -> None:
    """Where the teacher came from elsewhere only its accuracy is known."""
    known = {run.seed: run.conversion.teacher_top1 for run in row.runs if run.conversion is not None}
    row.against, row.delta = "the teacher", difference({run.seed: run.top1 for run in row.runs}, known)


def add_ladders(rows: Sequence[CandidateRow], speeds: Sequence[Speed]) -> None:
    """Join speeds to rows: by the candidate's key, or else by candidate, patch and architecture."""
    by_key: dict[str, list[Speed]] = defaultdict(list)
    for speed in speeds:
        by_key[speed.candidate_key].append(speed)
        by_key[family(speed)].append(speed)
    for row in rows:
        row.ladders = ladders(by_key.get(row.first.candidate_key) or by_key.get(family(row.first)) or [])


def family(result: Run | Speed) -> str:
    return digest([result.label.candidate, result.label.patch, result.identity.architecture])


def ladders(speeds: Iterable[Speed]) -> list[Ladder]:
    timed = [(point, chip_of(speed, point)) for speed in speeds for point in speed.rows]
    found: dict[tuple[str, str, str, bool], dict[int, SpeedPoint]] = defaultdict(dict)
    for point, chip in sorted(timed, key=lambda row: (row[0].tokens, row[0].batch)):
        found[point.device, chip, point.what, point.batch > 1].setdefault(point.size, point)
    return [ladder(*which, tuple(points.values())) for which, points in sorted(found.items())]


def ladder(device: str, chip: str, what: str, many: bool, points: tuple[SpeedPoint, ...]) -> Ladder:
    timed = [(p.tokens, p.median / p.batch) for p in points if p.median is not None]
    held = [(p.tokens, p.peak_bytes / p.batch) for p in points if p.peak_bytes is not None]
    time, memory = (fit_exponent([x for x, _ in found], [y for _, y in found]) for found in (timed, held))
    return Ladder(device, chip, what, many, points, time, memory)


def chip_of(speed: Speed, point: SpeedPoint) -> str:
    """A chip as people name it, without the maker's ornaments, and how it was used."""
    name = speed.chip(point)
    for ornament in ("(R)", "(TM)", " Processor", " CPU", " with Radeon Graphics"):
        name = name.replace(ornament, "")
    name = re.sub(r" \d+-Core\b", "", name)
    return ", ".join([f"CPU {name}" if point.device == "cpu" else name, *use_of(point)])


def use_of(point: SpeedPoint) -> list[str]:
    """In which precision, and how."""
    ways = (("compiled", point.compiled), ("CUDA graph", point.cuda_graph))
    return [name for name in (point.precision, *(way for way, taken in ways if taken)) if name]
