"""Runs that differ by their seed only make one row: means, intervals, the difference to softmax, and speeds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from linvit.codec import digest, to_plain
from linvit.comparison.description.job import counted_config
from linvit.comparison.results import (
    ConversionResult,
    Drift,
    Label,
    Run,
    Speed,
    SpeedPoint,
    TrainedTeacher,
    TrainingIdentity,
)
from linvit.comparison.statistics.estimates import (
    Difference,
    Estimate,
    Scored,
    average,
    difference,
    estimate,
)
from linvit.comparison.statistics.naming import readable
from linvit.comparison.statistics.reading import Results
from linvit.comparison.statistics.speeds import Ladder, ladders, normalised

T = TypeVar("T")
BASELINE = "softmax"
OTHERS = ("probe",)  # metrics beside the main one whose difference to the teacher is told
MODES = {"scratch": "Trained from scratch", "distil": "Distilled from softmax"}
OWN = ("seed", "teacher", "input_size", "eval_epochs")  # of a recipe's config: what runs of one setting may differ in


@dataclass(eq=False)
class CandidateRow:
    """A candidate at one patch size and resolution, in one setting."""

    runs: list[Run]
    is_teacher: bool = False
    baseline: "CandidateRow | None" = None
    against: str = BASELINE  # or the teacher, where softmax was not distilled
    first: Run = field(init=False)
    label: Label = field(init=False)
    name: str = field(init=False)
    patch: int = field(init=False)  # 0 where the architecture's own is not known
    seeds: list[int] = field(init=False)
    score: Estimate = field(init=False)
    delta: Difference | None = None
    deltas: dict[str, Difference] = field(default_factory=dict)  # by other metrics, to the teacher
    ladders: list[Ladder] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs.sort(key=lambda run: run.seed)
        self.first, self.label = self.runs[0], self.runs[0].label
        self.name = readable(self.label.candidate) + (" (teacher)" if self.is_teacher else "")
        self.patch, self.seeds = self.label.patch or 0, [run.seed for run in self.runs]
        self.score = estimate([run.score for run in self.runs])

    @property
    def metric(self) -> str:
        """What the score is: top1, mAP, mIoU, knn or cosine."""
        return self.first.accuracy.metric

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics of a detector, segmenter or backbone: means over seeds."""
        return means_by_name([run.accuracy.metrics for run in self.runs])

    @property
    def per_class(self) -> dict[str, float]:
        """The same for the metric of each class."""
        return means_by_name([run.accuracy.per_class for run in self.runs])

    @property
    def place(self) -> tuple[int, int, str]:
        """Rows of one place are compared with each other: patch, resolution, teacher, which is itself one of them."""
        return self.patch, self.label.size, self.first.key if self.is_teacher else teacher_of(self.first.identity)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the score: over seeds, or over images where there is a single seed and they are right or wrong."""
        error = self.first.accuracy.standard_error
        if self.score.interval is not None or error is None:
            return self.score.interval
        return self.score.mean - 1.96 * error, self.score.mean + 1.96 * error

    def points_by(self, clock: Ladder) -> list[SpeedPoint]:
        """All that was timed as that clock times."""
        return [point for ladder in self.ladders if ladder.same_clock(clock) for point in ladder.points]

    @property
    def conversion(self) -> ConversionResult | None:
        """Means over seeds; None where nothing was converted."""
        found = [run.conversion for run in self.runs if run.conversion is not None]
        return mean_of(found) if found else None

    def drift(self, dtype: str) -> Drift | None:
        """Half precision: means over seeds, finite only if all are."""
        found = [d for run in self.runs for d in run.drift if d.dtype == dtype and d.finite is not None]
        return replace(mean_of(found), finite=all(d.finite for d in found)) if found else None


def mean_of(records: Sequence[T]) -> T:
    """A record with the means of these records' numbers; of the rest the first one's."""
    first, means = records[0], {}
    for name in (f.name for f in fields(first)):  # type: ignore[arg-type]
        values = [getattr(record, name) for record in records]
        if any(type(value) in (int, float) for value in values):
            means[name] = average(values)
    return replace(first, **means)  # type: ignore[type-var]


def means_by_name(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means of what all records have."""
    names = [name for name in records[0] if all(name in record for record in records)]
    return {name: sum(record[name] for record in records) / len(records) for name in names}


@dataclass(frozen=True)
class Setting:
    """What the compared runs have in common."""

    key: str
    title: str
    mode: str
    rows: tuple[CandidateRow, ...]

    @property
    def metric(self) -> str:
        return self.rows[0].metric

    @property
    def by_image(self) -> bool:
        return self.rows[0].first.by_image

    @property
    def of_features(self) -> bool:
        return self.rows[0].first.identity.task == "features"

    def places(self, *, teachers: bool) -> list[list[CandidateRow]]:
        """The rows that are compared with each other, with or without the teacher that they learnt from."""
        found: dict[tuple[int, int, str], list[CandidateRow]] = defaultdict(list)
        for row in self.rows:
            if teachers or not row.is_teacher:
                found[row.place].append(row)
        return list(found.values())


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
        # A teacher that was trained as part of the comparison stands beside those that learnt from it.
        taught = {teacher_of(row.first.identity) for row in rows} & results.teachers.keys()
        # One that was trained to classify is no row among those that are judged by their features.
        beside = [results.teachers[key] for key in sorted(taught)]
        rows += [CandidateRow([run], is_teacher=True) for run in beside if run.accuracy.metric == rows[0].metric]
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
    common = {
        "mode": run.label.mode,
        "architecture": run.identity.architecture,
        "data": run.identity.data.digest or run.data.digest,
        "config": shared_config(run.identity),
        "teacher": school(run.identity),
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
    architecture, config, how = run.identity.architecture, run.identity.config, run.label.mode
    words = [f"{'Trained' if run.identity.head and how == 'scratch' else MODES.get(how, how)} on {run.data.name}"]
    words = [f"Features aligned on {run.data.name}"] if run.identity.task == "features" else words
    model = architecture.get("model")
    words += (
        [f"{model} on {'a trained ' if 'trunk' in architecture else ''}{architecture.get('backbone')}"]
        if (run.identity.head)
        else [str(model)]
        if model
        else []
    )
    words += [f"recipe {config['recipe']}"] if config.get("recipe") else []
    epochs = config.get("epochs")
    words += [f"{epochs:g} epoch{'' if epochs == 1 else 's'}"] if isinstance(epochs, int | float) else []
    words += [f"stages {' '.join(stage['name'] for stage in config['stages'])}"] if run.identity.task else []
    return ", ".join(words)


def add_differences(rows: Sequence[CandidateRow]) -> None:
    """To softmax of the same place, or else to the teacher; of one from elsewhere only its accuracy is known."""
    softmax = {row.place: row for row in rows if row.label.candidate == BASELINE and not row.is_teacher}
    teachers = {row.first.key: row for row in rows if row.is_teacher}
    for row in rows:
        base = softmax.get(row.place) or teachers.get(teacher_of(row.first.identity))
        base = None if row.first.identity.task == "features" else base
        if base is row or row.is_teacher:
            continue
        row.baseline, row.against = base, "the teacher" if base is None or base.is_teacher else BASELINE
        if base is not None:
            row.delta = paired(row, base)
        else:
            row.delta = to_teacher(row)
            row.deltas = {name: delta for name in OTHERS if (delta := to_teacher(row, name)) is not None}


def to_teacher(row: CandidateRow, metric: str = "") -> Difference | None:
    """The difference to a teacher that is no row here, image by image where its own are known: of a backbone's."""
    ours: dict[int, Scored] = {}
    theirs: dict[int, Scored] = {}
    for run in row.runs:
        beside = f"teacher_{metric or run.accuracy.metric}"
        known = beside in run.accuracy.metrics
        if not metric and run.conversion is not None:
            ours[run.seed] = run.score, run.right if known else None
            theirs[run.seed] = run.right_by(beside) if known else (run.conversion.teacher_score, None)
        elif metric and known:
            ours[run.seed], theirs[run.seed] = run.right_by(metric), run.right_by(beside)
    return difference(ours, theirs)


def paired(row: CandidateRow, base: CandidateRow) -> Difference | None:
    """How much better a row is than another, seed by seed and image by image."""
    theirs = {run.seed: run for run in base.runs}
    if base.is_teacher:  # one teacher, whatever the seed of those that learnt from it
        theirs = dict.fromkeys(row.seeds, base.first)
    return difference_of_runs({run.seed: run for run in row.runs}, theirs)


def difference_of_runs(a: Mapping[int, Run], b: Mapping[int, Run]) -> Difference | None:
    """The same for runs by seed."""
    scores = ({seed: (run.score, run.right) for seed, run in side.items()} for side in (a, b))
    return difference(*scores)


def add_ladders(rows: Sequence[CandidateRow], speeds: Sequence[Speed]) -> None:
    """Join speeds to rows: by the candidate's key, or else by candidate, patch and architecture."""
    by_key: dict[str, list[Speed]] = defaultdict(list)
    for speed in speeds:
        by_key[speed.candidate_key].append(speed)
        by_key[family(speed)].append(speed)
    for row in rows:
        row.ladders = ladders(by_key.get(row.first.candidate_key) or by_key.get(family(row.first)) or [])
    softmax = {family(row.first, BASELINE): row.ladders for row in rows if row.label.candidate == BASELINE}
    for row in rows:
        beside = softmax.get(family(row.first, BASELINE), [])
        row.ladders = [normalised(ladder, beside) for ladder in row.ladders]


def family(result: Run | Speed, candidate: str = "") -> str:
    """What a speed is of; with `candidate`, that candidate's in its place."""
    return digest([candidate or result.label.candidate, result.label.patch, result.identity.architecture])
