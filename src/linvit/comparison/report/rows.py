"""Runs that differ by their seed only make one row: means, intervals, the difference to softmax, and speeds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from linvit.comparison.report.reading import Results, Run, Timing, average, family_of
from linvit.comparison.statistics import Difference, Estimate, Fit, difference, estimate, fit_exponent

BASELINE = "softmax"
MODES = {"scratch": "Trained from scratch", "distil": "Distilled from softmax"}


@dataclass(frozen=True)
class Speed:
    """A candidate on one chip, in one pass, one image at a time or many: its ladder and how it grows."""

    device: str
    chip: str  # and how it was used: what a time must not be compared without
    what: str
    many: bool  # the batch of throughput, not one image
    ladder: tuple[Timing, ...]  # by tokens
    time: Fit | None
    memory: Fit | None

    def same_clock(self, other: Speed) -> bool:
        """Whether two candidates were timed on the same chip in the same way."""
        ours, theirs = ((s.chip, s.what, s.many) for s in (self, other))
        return ours == theirs


@dataclass(eq=False)
class Row:
    """A candidate at one patch size and resolution, in one setting."""

    runs: list[Run]
    is_teacher: bool = False
    baseline: Row | None = None
    against: str = BASELINE  # or the teacher, where softmax was not distilled
    top1: Estimate = field(init=False)
    delta: Difference | None = None
    speeds: list[Speed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs.sort(key=lambda run: run.seed)
        self.top1 = estimate([run.top1 for run in self.runs])

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def name(self) -> str:
        return f"{self.first.candidate} (teacher)" if self.is_teacher else self.first.candidate

    @property
    def place(self) -> tuple[str, int, int, str]:
        """Rows of one place are compared with each other: setting, patch, resolution, teacher."""
        return self.first.setting, self.first.patch, self.first.size, self.first.teacher

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    def at(self, seed: int) -> float:
        """Top-1 of one seed."""
        return next(run.top1 for run in self.runs if run.seed == seed)

    @property
    def tokens(self) -> int | None:
        found = self.first.number("model", "tokens")
        return None if found is None else int(found)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of top-1: over seeds, or over images where there is a single seed."""
        error = self.first.number("accuracy", "standard_error")
        if self.top1.interval is not None or error is None:
            return self.top1.interval
        return self.top1.mean - 1.96 * error, self.top1.mean + 1.96 * error

    def mean(self, *path: str) -> float | None:
        """The mean over seeds of a number in the runs' files."""
        return average(run.number(*path) for run in self.runs)

    def drift(self, dtype: str) -> tuple[float | None, float | None, bool] | None:
        """Relative RMS, agreement and finiteness of half precision: the mean over seeds, finite only if all are."""
        drifts = (d for run in self.runs for d in run.get("drift") or ())
        found = [d for d in drifts if d.get("dtype") == dtype and d.get("finite") is not None]
        if not found:
            return None
        values = (average(d.get(name) for d in found) for name in ("relative_rms", "agreement"))
        return *values, all(d["finite"] for d in found)  # type: ignore[return-value]

    def curve(self) -> list[tuple[float, float, float, float, int]]:
        """Per evaluated epoch: epoch, mean, least and greatest top-1 over the seeds, and how many of them."""
        at: dict[float, list[float]] = defaultdict(list)
        for run in self.runs:
            for epoch in run.get("accuracy", "epochs") or ():
                if isinstance(epoch.get("top1"), int | float):
                    at[float(epoch["epoch"])].append(float(epoch["top1"]))
        return [(e, float(np.mean(found)), min(found), max(found), len(found)) for e, found in sorted(at.items())]


@dataclass(frozen=True)
class Setting:
    """What the compared runs have in common."""

    key: str
    title: str
    mode: str
    rows: tuple[Row, ...]


def settings(results: Results) -> list[Setting]:
    """All rows, grouped by what is compared with what; the largest comparison first."""
    groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in results.runs:
        group = groups[run.setting, run.candidate_key, run.teacher]
        if run.seed in {other.seed for other in group}:
            results.notes.append(f"Run {run.key} repeats seed {run.seed} of {run.candidate}; the first one counts.")
        else:
            group.append(run)
    by_setting: dict[str, list[Row]] = defaultdict(list)
    for (setting, _, _), runs in groups.items():
        by_setting[setting].append(Row(runs))
    for rows in by_setting.values():
        add_teachers(rows, results)
        add_differences(rows)
    add_speeds([row for rows in by_setting.values() for row in rows], results.timings)
    made = [Setting(key, title(rows), rows[0].first.mode, tuple(rows)) for key, rows in by_setting.items()]
    made.sort(key=lambda setting: (-sum(not row.is_teacher for row in setting.rows), setting.mode != "scratch"))
    for tell in (teacher_seed, lambda setting: f" ({setting.key[:4]})"):
        titles = [setting.title for setting in made]
        made = [
            replace(setting, title=setting.title + tell(setting)) if titles.count(setting.title) > 1 else setting
            for setting in made
        ]
    return made


def teacher_seed(setting: Setting) -> str:
    seed = setting.rows[0].first.get("identity", "teacher", "identity", "seed")
    return "" if seed is None else f", teacher of seed {seed}"


def title(rows: Sequence[Row]) -> str:
    run = rows[0].first
    data, epochs = run.get("data", "name") or "?", run.get("identity", "config", "epochs")
    words = [f"{MODES.get(run.mode, run.mode)} on {data}"]
    model, recipe = run.get("identity", "architecture", "model"), run.get("identity", "config", "recipe")
    words += [str(model)] if model else []
    words += [f"recipe {recipe}"] if recipe else []
    words += [f"{epochs:g} epochs"] if isinstance(epochs, int | float) else []
    return ", ".join(words)


def add_teachers(rows: list[Row], results: Results) -> None:
    """A teacher that was trained as part of the comparison stands beside those that learnt from it."""
    for key in sorted({row.first.teacher for row in rows} & set(results.teachers)):
        rows.append(Row([results.teachers[key]], is_teacher=True))


def add_differences(rows: Sequence[Row]) -> None:
    places = {row.place: row for row in rows if row.first.candidate == BASELINE and not row.is_teacher}
    teachers = {row.first.key: row for row in rows if row.is_teacher}
    for row in rows:
        base = places.get(row.place) or teachers.get(row.first.teacher)
        if base is row or row.is_teacher:
            continue
        if base is None:
            add_difference_to_teacher(row)
            continue
        row.baseline, row.against = base, "the teacher" if base.is_teacher else BASELINE
        row.delta = paired(row, base)


def paired(row: Row, base: Row) -> Difference | None:
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


def add_difference_to_teacher(row: Row) -> None:
    """Where the teacher came from elsewhere only its accuracy is known."""
    known = {run.seed: top1 for run in row.runs if (top1 := run.number("conversion", "teacher_top1")) is not None}
    row.against, row.delta = "the teacher", difference({run.seed: run.top1 for run in row.runs}, known)


def add_speeds(rows: Sequence[Row], timings: Sequence[Timing]) -> None:
    by_key: dict[str, list[Timing]] = defaultdict(list)
    by_family: dict[str, list[Timing]] = defaultdict(list)
    for timing in timings:
        by_key[timing.candidate_key].append(timing)
        by_family[timing.family].append(timing)
    for row in rows:
        row.speeds = speeds(by_key.get(row.first.candidate_key) or by_family.get(family_of(row.first)) or [])


def speeds(timings: Iterable[Timing]) -> list[Speed]:
    ladders: dict[tuple[str, str, str, bool], dict[int, Timing]] = defaultdict(dict)
    for timing in sorted(timings, key=lambda t: (t.tokens, t.batch)):
        ladders[timing.device, chip_of(timing), timing.what, timing.batch > 1].setdefault(timing.size, timing)
    return [speed(*which, tuple(ladder.values())) for which, ladder in sorted(ladders.items())]


def speed(device: str, chip: str, what: str, many: bool, ladder: tuple[Timing, ...]) -> Speed:
    timed = [t for t in ladder if t.median is not None]
    held = [t for t in ladder if t.peak_bytes is not None]
    time = fit_exponent([t.tokens for t in timed], [(t.median or 0) / t.batch for t in timed])
    memory = fit_exponent([t.tokens for t in held], [(t.peak_bytes or 0) / t.batch for t in held])
    return Speed(device, chip, what, many, ladder, time, memory)


def chip_of(timing: Timing) -> str:
    """A chip as people name it, without the maker's ornaments, and how it was used."""
    name = timing.hardware
    for ornament in ("(R)", "(TM)", " Processor", " CPU", " with Radeon Graphics"):
        name = name.replace(ornament, "")
    name = re.sub(r" \d+-Core\b", "", name)
    return ", ".join([f"CPU {name}" if timing.device == "cpu" else name, *use_of(timing)])


def use_of(timing: Timing) -> list[str]:
    """In which precision, and how."""
    ways = (("compiled", timing.compiled), ("CUDA graph", timing.cuda_graph))
    return [name for name in (timing.precision, *(way for way, taken in ways if taken)) if name]


def stripped_environment(data: dict[str, object]) -> dict[str, object]:
    environment = data.get("environment")
    if not isinstance(environment, dict):
        return {}
    return {name: value for name, value in environment.items() if name not in ("time", "command")}
