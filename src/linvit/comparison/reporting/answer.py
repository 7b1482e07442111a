"""All that a report says, whatever it is written as, and the answer first: which mechanism at which token count, in
two sentences that the data write.

At each token count of the ladder the pick is the fastest candidate whose mean score (top-1, mAP or mIoU) lies at most
so many points below softmax; of those within five percent of the fastest, which a clock hardly tells apart, the most
accurate. Softmax is itself a candidate. Whether the seeds can tell the pick's score from softmax's is said beside it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from linvit.comparison.reporting.wording import (
    accuracy,
    count,
    in_words,
    interval,
    listing,
    metric_name,
    multiple,
    points,
)
from linvit.comparison.results import SpeedPoint
from linvit.comparison.statistics.estimates import Difference
from linvit.comparison.statistics.reading import Results, read
from linvit.comparison.statistics.rows import BASELINE, CandidateRow, Setting, settings
from linvit.comparison.statistics.speeds import Ladder

TOLERANCES = (0.5, 1.0, 2.0, 5.0)  # points of the score one may be ready to pay
USUAL = 1.0
SAME_SPEED = 1.05


@dataclass(frozen=True)
class Recommendation:
    """What to take at one token count."""

    tokens: int
    size: int
    row: CandidateRow | None  # None: softmax, where it is not itself among the rows
    ratio: float | None  # times softmax's speed; None where that is not known
    rivals: tuple[str, ...] = ()  # as fast, less accurate
    lost: str = ""  # what became of softmax, where there is no ratio

    @property
    def name(self) -> str:
        return BASELINE if self.row is None else self.row.name


@dataclass(frozen=True)
class Picks:
    """The picks on one chip, in one pass, for rows of one place and one tolerance."""

    chip: str
    many: bool
    batch: int
    tolerance: float
    picks: tuple[Recommendation, ...]


@dataclass(frozen=True)
class Answer:
    sentences: tuple[str, ...]
    picks: tuple[Picks, ...] = ()


@dataclass(frozen=True)
class Contents:
    results: Results
    settings: tuple[Setting, ...]
    answers: tuple[Answer, ...]  # one for each setting

    @property
    def answer(self) -> Answer:
        """Of the largest comparison."""
        return self.answers[0] if self.answers else Answer(("No run has finished yet.",))


def gather(stores: Sequence[str | Path]) -> Contents:
    """Read the stores, folders or archives, and work out what they say."""
    results = read(stores)
    found = tuple(settings(results))
    return Contents(results, found, tuple(map(answer, found)))


def answer(setting: Setting) -> Answer:
    """Two sentences about a setting, and the picks of every chip and tolerance there."""
    rows = main_rows(setting)
    picks = tuple(pick_all(rows, clock, tolerance) for clock in clocks(rows) for tolerance in TOLERANCES)
    compared = [row for row in rows if row.delta is not None]
    if not compared:
        return Answer((without_softmax(rows),), picks)
    worth = "accuracy" if setting.by_image else metric_name(setting.metric)
    usual = next((found for found in picks if found.tolerance == USUAL and found.picks), None)
    if usual is None:
        return Answer((accuracy_sentence(compared, None), "No speeds were measured yet."), picks)
    first = f"{speed_sentence(usual, worth)}: {studied(rows[0])}, {timed_on(usual)}."
    return Answer((first, accuracy_sentence(compared, usual.picks[-1].row)), picks)


def studied(row: CandidateRow) -> str:
    """The data in plain words: `ten classes, 6,000 training images, 128 px`."""
    classes, images = row.first.identity.classes, row.first.data.train
    words = [f"{in_words(classes)} class{'' if classes == 1 else 'es'}"] if classes else []
    words += [f"{count(images)} training images"] if images else []
    return ", ".join([*words, f"{row.label.size} px"])


def timed_on(found: Picks) -> str:
    return f"{found.chip}, {f'batches of {found.batch}' if found.many else 'one image at a time'}"


def main_rows(setting: Setting) -> list[CandidateRow]:
    """The rows of the place with the most runs; of equals the smallest patch, where there are the most tokens."""
    places = setting.places(teachers=False)
    found = max(places, key=lambda rows: (sum(len(row.runs) for row in rows), -rows[0].patch))
    return sorted(found, key=lambda row: -row.score.mean)


def clocks(rows: Sequence[CandidateRow]) -> list[Ladder]:
    """One ladder of each chip and batch that softmax, or else anyone, was timed with: CUDA and throughput first."""
    found: dict[tuple[str, bool], Ladder] = {}
    for row in sorted(rows, key=lambda row: row.label.candidate != BASELINE):
        for ladder in row.ladders:
            if ladder.what == "inference":
                found.setdefault((ladder.chip, ladder.many), ladder)
    return sorted(found.values(), key=lambda ladder: (ladder.device == "cpu", not ladder.many, ladder.chip))


def clock_of(rows: Sequence[CandidateRow], *, many: bool) -> Ladder | None:
    """What one table times its rows with: times of two chips never stand in one column."""
    return next((clock for clock in clocks(rows) if clock.many == many), None)


def at_own_size(row: CandidateRow, clock: Ladder | None) -> SpeedPoint | None:
    """Its inference by that clock at the size it was trained at."""
    points = row.points_by(clock) if clock is not None else ()
    return next((point for point in points if point.size == row.label.size), None)


def side_by_side(row: CandidateRow, clock: Ladder | None) -> float | None:
    """Times softmax's speed at the size it was trained at, which alone ranks candidates; softmax's is 1."""
    point = at_own_size(row, clock)
    if point is None or point.median is None:
        return None
    return 1.0 if row.label.candidate == BASELINE else point.ratio


def pick_all(rows: Sequence[CandidateRow], clock: Ladder, tolerance: float) -> Picks:
    fit = [row for row in rows if row.label.candidate == BASELINE or (row.delta and row.delta.mean >= -tolerance)]
    timed: dict[int, list[tuple[SpeedPoint, CandidateRow]]] = defaultdict(list)
    notes: dict[int, str] = {}
    for row in fit:
        for point in row.points_by(clock):
            if point.median is not None:
                timed[point.size].append((point, row))
            elif row.label.candidate == BASELINE:
                notes[point.size] = point.note or ""
    made = tuple(pick(timed[size], notes.get(size, "")) for size in sorted(timed))
    return Picks(clock.chip, clock.many, clock.points[0].batch, tolerance, made)


def pick(timed: Sequence[tuple[SpeedPoint, CandidateRow]], note: str = "") -> Recommendation:
    """Of candidates timed at one size, by their ratios, which were measured side by side. Times of separate jobs
    decide only where nobody has a ratio. `note` says why softmax has no time here."""
    first, softmax = timed[0][0], next((found for found in timed if found[1].label.candidate == BASELINE), None)
    speeds = [(timing.ratio, timing, row) for timing, row in timed if timing.ratio and (timing, row) != softmax]
    if speeds:
        if max(speed for speed, _, _ in speeds) < SAME_SPEED:  # nothing to win: keep what everyone has
            return Recommendation(first.tokens, first.size, softmax[1] if softmax else None, 1.0)
        speeds += [(1.0, *softmax)] if softmax else []
    else:
        speeds = [(timing.batch / (timing.median or 1.0), timing, row) for timing, row in timed]
    fastest = max(speed for speed, _, _ in speeds)
    near = [(timing, row) for speed, timing, row in speeds if speed * SAME_SPEED >= fastest]
    timing, row = softmax if softmax and softmax in near else max(near, key=lambda found: found[1].score.mean)
    rivals = tuple(sorted(other.name for _, other in near if other is not row))
    ratio, lost = timing.ratio, ""
    if ratio is None and softmax is not None:
        ratio = (softmax[0].median or 0.0) * timing.batch / ((timing.median or 1.0) * softmax[0].batch)
    elif ratio is None:
        lost = f"softmax {'runs out of memory' if 'memory' in note else 'was not timed'}"
    return Recommendation(timing.tokens, timing.size, row, ratio, rivals, lost)


def speed_sentence(found: Picks, worth: str) -> str:
    """Which mechanism at which token count, for how much of what it is `worth`."""
    spans = [(name, list(group)) for name, group in groupby(found.picks, key=lambda pick: pick.name)]
    last = found.picks[-1]
    if len(spans) == 1 and last.name == BASELINE:
        return (
            f"Keep softmax, as no mechanism within {points(found.tolerance)} of its {worth} was clearly faster"
            f" at any token count up to {count(last.tokens)}"
        )
    words: list[str] = []
    told, rated = False, any(pick.ratio is not None for pick in found.picks)
    for name, group in spans:
        ends = [pick.tokens for pick in group]
        at = f"at {count(ends[0])}" if len(ends) == 1 else f"from {count(ends[0])} to {count(ends[-1])}"
        if name == BASELINE:
            words.append(f"softmax {at if words else 'up to ' + count(ends[-1])} tokens")
        else:
            won = gain(group, " as fast as softmax" if not told else "") if rated else ""
            words.append(f"{name} {at} tokens{won}")
            told = True
    return f"Take {listing(words)}, giving up at most {points(found.tolerance)} of {worth}"


def gain(group: Sequence[Recommendation], unit: str) -> str:
    rated = [pick for pick in group if pick.ratio is not None]
    if not rated:
        return f", where {group[-1].lost}"
    ratios = [multiple(pick.ratio or 0.0) for pick in rated]
    text = ratios[-1] if len(set(ratios)) == 1 else f"{ratios[0]} to {ratios[-1]}"
    ending = f"; beyond {count(rated[-1].tokens)} {group[-1].lost}" if rated[-1] is not group[-1] else ""
    return f" ({text}{unit}{ending})"


def accuracy_sentence(compared: Sequence[CandidateRow], taken: CandidateRow | None) -> str:
    """What it costs against softmax, or against the teacher, and whether the seeds can tell."""
    row = taken if taken is not None and taken.delta else compared[0]
    assert row.delta is not None
    taught = row.conversion.teacher_score if row.conversion else None
    base = row.baseline.score.mean if row.baseline else taught
    tokens = f"At {count(row.first.model.tokens)} tokens " if row.first.model.tokens else ""
    name = row.name if row is taken or len(compared) == 1 else f"the most accurate, {row.name},"
    text = f"{tokens}{name} scored {accuracy(row.score.mean)} {metric_name(row.metric)}"
    text += f" against {row.against}'s {accuracy(base)}, {verdict(row.delta)}"
    if len(compared) == 1:
        return f"{text}."
    clear = [row.delta.mean for row in compared if row.delta and row.delta.clear]
    if not clear:
        return f"{text}; none of the {len(compared)} candidates can be told from {row.against} by these runs."
    better, worse, unclear = sum(m > 0 for m in clear), sum(m < 0 for m in clear), len(compared) - len(clear)
    tally = [f"{better} {'is' if better == 1 else 'are'} clearly better than {row.against}"] if better else []
    than = "" if better else f" than {row.against}"
    tally += [f"{worse} {'is' if worse == 1 else 'are'} clearly worse{than}"] if worse else []
    tally += [f"{unclear} cannot be told from it"] if unclear else []
    return f"{text}; of {len(compared)} candidates, {listing(tally)}."


def verdict(delta: Difference) -> str:
    seeds = "a single seed" if delta.seeds == 1 else f"{delta.seeds} paired seeds"
    said = f"{points(delta.mean, sign=True)} {interval(delta.interval)}".strip()
    if delta.interval is None:
        return f"{said}, and {seeds} cannot say how sure that is"
    if delta.clear:
        return f"{said}, which {seeds} {'tells' if delta.seeds == 1 else 'tell'} from zero"
    worse = f" nor from a loss of more than {points(USUAL)}" if delta.interval[0] < -USUAL else ""
    return f"{said}, which {seeds} {'does' if delta.seeds == 1 else 'do'} not tell from zero{worse}"


def without_softmax(rows: Sequence[CandidateRow]) -> str:
    best = rows[0]
    if len(rows) == 1:
        found = f"{accuracy(best.score.mean)} {metric_name(best.metric)}"
        return f"{best.name} scored {found}, and there is nothing to compare it with yet."
    text = f"Softmax was not trained here, so nothing is said against it: {best.name} scored highest,"
    text += f" {accuracy(best.score.mean)} {metric_name(best.metric)}"
    close = [row.name for row in rows[1:] if row.interval and row.interval[1] >= best.score.mean]
    return f"{text}, which lies within the intervals of {listing(close)}." if close else f"{text}."
