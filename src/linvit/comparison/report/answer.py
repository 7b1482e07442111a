"""The answer first: which mechanism at which token count, in two sentences that the data write.

At each token count of the ladder the pick is the fastest candidate whose mean top-1 lies at most so many points below
softmax; of those within five percent of the fastest, which a clock hardly tells apart, the most accurate. Softmax is
itself a candidate. Whether the seeds can tell the pick's accuracy from softmax's is said beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from linvit.comparison.report.reading import Timing
from linvit.comparison.report.rows import BASELINE, Row, Setting, Speed
from linvit.comparison.report.wording import accuracy, count, interval, listing, multiple, points
from linvit.comparison.statistics import Difference

TOLERANCES = (0.5, 1.0, 2.0, 5.0)  # points of top-1 one may be ready to pay
USUAL = 1.0
SAME_SPEED = 1.05


@dataclass(frozen=True)
class Pick:
    """What to take at one token count."""

    tokens: int
    size: int
    row: Row | None  # None: softmax, where it is not itself among the rows
    ratio: float | None  # times softmax's speed; None where that is not known
    rivals: tuple[str, ...] = ()  # as fast, less accurate
    lost: str = ""  # what became of softmax, where there is no ratio

    @property
    def name(self) -> str:
        return BASELINE if self.row is None else self.row.name


@dataclass(frozen=True)
class Ladder:
    """The picks on one chip, in one pass, for rows of one place and one tolerance."""

    chip: str
    what: str
    many: bool
    batch: int
    patch: int
    tolerance: float
    picks: tuple[Pick, ...]


@dataclass(frozen=True)
class Answer:
    sentences: tuple[str, ...]
    ladders: tuple[Ladder, ...] = field(default=())


def answer(settings: Sequence[Setting]) -> Answer:
    """Two sentences about the largest comparison, and the picks of every chip and tolerance there."""
    if not settings:
        return Answer(("No run has finished yet.",))
    rows = main_rows(settings[0])
    ladders = tuple(picks(rows, clock, tolerance) for clock in clocks(rows) for tolerance in TOLERANCES)
    compared = [row for row in rows if row.delta is not None]
    if not compared:
        return Answer((without_softmax(rows),), ladders)
    usual = next((ladder for ladder in ladders if ladder.tolerance == USUAL and ladder.picks), None)
    if usual is None:
        return Answer((accuracy_sentence(compared, None), "No speeds were measured yet."), ladders)
    return Answer((speed_sentence(usual), accuracy_sentence(compared, usual.picks[-1].row)), ladders)


def main_rows(setting: Setting) -> list[Row]:
    """The rows of the place with the most runs; of equals the smallest patch, where there are the most tokens."""
    places: dict[tuple[str, int, int, str], list[Row]] = defaultdict(list)
    for row in setting.rows:
        places[row.place].append(row)
    found = max(places.values(), key=lambda rows: (sum(len(row.runs) for row in rows), -rows[0].first.patch))
    return sorted((row for row in found if not row.is_teacher), key=lambda row: -row.top1.mean)


def clocks(rows: Sequence[Row]) -> list[Speed]:
    """One speed of each chip and batch that softmax, or else anyone, was timed with: CUDA and throughput first."""
    found: dict[tuple[str, bool], Speed] = {}
    for row in sorted(rows, key=lambda row: row.first.candidate != BASELINE):
        for speed in row.speeds:
            if speed.what == "inference":
                found.setdefault((speed.chip, speed.many), speed)
    return sorted(found.values(), key=lambda speed: (speed.device == "cpu", not speed.many, speed.chip))


def clock_of(rows: Sequence[Row], *, many: bool) -> Speed | None:
    """What one table times its rows with: times of two chips never stand in one column."""
    return next((clock for clock in clocks(rows) if clock.many == many), None)


def at_own_size(row: Row, clock: Speed | None) -> Timing | None:
    """Its inference by that clock at the size it was trained at."""
    timings = (t for speed in row.speeds if clock is not None and speed.same_clock(clock) for t in speed.ladder)
    return next((timing for timing in timings if timing.size == row.first.size), None)


def picks(rows: Sequence[Row], clock: Speed, tolerance: float) -> Ladder:
    fit = [row for row in rows if row.first.candidate == BASELINE or (row.delta and row.delta.mean >= -tolerance)]
    timed: dict[int, list[tuple[Timing, Row]]] = defaultdict(list)
    notes: dict[int, str] = {}
    for row in fit:
        for timing in (timing for speed in row.speeds if speed.same_clock(clock) for timing in speed.ladder):
            if timing.median is not None:
                timed[timing.size].append((timing, row))
            elif row.first.candidate == BASELINE:
                notes[timing.size] = timing.note
    made = tuple(pick(timed[size], notes.get(size, "")) for size in sorted(timed))
    return Ladder(clock.chip, clock.what, clock.many, clock.ladder[0].batch, rows[0].first.patch, tolerance, made)


def pick(timed: Sequence[tuple[Timing, Row]], note: str = "") -> Pick:
    """Of candidates timed at one size. Ratios were measured side by side and go before times, which were not. `note`
    says why softmax has no time here."""
    first, softmax = timed[0][0], next((found for found in timed if found[1].first.candidate == BASELINE), None)
    rated = [(timing.ratio, timing, row) for timing, row in timed if timing.ratio is not None]
    if len(rated) == len(timed):
        speeds = rated
        if max(speed for speed, _, _ in speeds) < SAME_SPEED:  # nothing to win: keep what everyone has
            return Pick(first.tokens, first.size, softmax[1] if softmax else None, 1.0)
    else:
        speeds = [(timing.batch / (timing.median or 1.0), timing, row) for timing, row in timed]
    fastest = max(speed for speed, _, _ in speeds)
    near = [(timing, row) for speed, timing, row in speeds if speed * SAME_SPEED >= fastest]
    timing, row = softmax if softmax and softmax in near else max(near, key=lambda found: found[1].top1.mean)
    rivals = tuple(sorted(other.name for _, other in near if other is not row))
    ratio, lost = timing.ratio, ""
    if ratio is None and softmax is not None:
        ratio = (softmax[0].median or 0.0) * timing.batch / ((timing.median or 1.0) * softmax[0].batch)
    elif ratio is None:
        lost = f"softmax {'runs out of memory' if 'memory' in note else 'was not timed'}"
    return Pick(timing.tokens, timing.size, row, ratio, rivals, lost)


def speed_sentence(ladder: Ladder) -> str:
    """Which mechanism at which token count on this chip."""
    spans = [(name, list(group)) for name, group in groupby(ladder.picks, key=lambda pick: pick.name)]
    where = f"On {ladder.chip} ({'batches of ' + str(ladder.batch) if ladder.many else 'one image at a time'}),"
    last = ladder.picks[-1]
    if len(spans) == 1 and last.name == BASELINE:
        return (
            f"{where} keep softmax: no mechanism within {points(ladder.tolerance)} of its accuracy was clearly faster"
            f" at any token count up to {count(last.tokens)}."
        )
    words: list[str] = []
    told, rated = False, any(pick.ratio is not None for pick in ladder.picks)
    for name, group in spans:
        ends = [pick.tokens for pick in group]
        at = f"at {count(ends[0])}" if len(ends) == 1 else f"from {count(ends[0])} to {count(ends[-1])}"
        if name == BASELINE:
            words.append(f"softmax {at if words else 'up to ' + count(ends[-1])} tokens")
        else:
            won = gain(group, " as fast as softmax" if not told else "") if rated else ""
            words.append(f"{name} {at} tokens{won}")
            told = True
    return f"{where} giving up at most {points(ladder.tolerance)} of accuracy, take {listing(words)}."


def gain(group: Sequence[Pick], unit: str) -> str:
    rated = [pick for pick in group if pick.ratio is not None]
    if not rated:
        return f", where {group[-1].lost}"
    ratios = [multiple(pick.ratio or 0.0) for pick in rated]
    text = ratios[-1] if len(set(ratios)) == 1 else f"{ratios[0]} to {ratios[-1]}"
    ending = f"; beyond {count(rated[-1].tokens)} {group[-1].lost}" if rated[-1] is not group[-1] else ""
    return f" ({text}{unit}{ending})"


def accuracy_sentence(compared: Sequence[Row], taken: Row | None) -> str:
    """What it costs against softmax, or against the teacher, and whether the seeds can tell."""
    row = taken if taken is not None and taken.delta else compared[0]
    assert row.delta is not None
    base = row.baseline.top1.mean if row.baseline else row.mean("conversion", "teacher_top1")
    tokens = f"At {count(row.tokens)} tokens " if row.tokens else ""
    name = row.name if row is taken or len(compared) == 1 else f"the most accurate, {row.name},"
    text = f"{tokens}{name} scored {accuracy(row.top1.mean)} top-1 against {row.against}'s {accuracy(base)}"
    text += f", {verdict(row.delta)}"
    if len(compared) == 1:
        return f"{text}."
    clear = [row.delta.mean for row in compared if row.delta and row.delta.clear]
    if not clear:
        return f"{text}; none of the {len(compared)} candidates can be told from {row.against} by these runs."
    better, worse, unclear = sum(m > 0 for m in clear), sum(m < 0 for m in clear), len(compared) - len(clear)
    tally = [f"{better} {be(better)} clearly better than {row.against}"] if better else []
    tally += [f"{worse} {be(worse)} clearly worse" + ("" if better else f" than {row.against}")] if worse else []
    tally += [f"{unclear} cannot be told from it"] if unclear else []
    return f"{text}; of {len(compared)} candidates, {listing(tally)}."


def be(number: int) -> str:
    return "is" if number == 1 else "are"


def verdict(delta: Difference) -> str:
    seeds = "a single seed" if delta.seeds == 1 else f"{delta.seeds} paired seeds"
    said = f"{points(delta.mean, sign=True)} {interval(delta.interval)}".strip()
    if delta.interval is None:
        return f"{said}, and {seeds} cannot say how sure that is"
    if delta.clear:
        return f"{said}, which {seeds} {'tells' if delta.seeds == 1 else 'tell'} from zero"
    worse = f" nor from a loss of more than {points(USUAL)}" if delta.interval[0] < -USUAL else ""
    return f"{said}, which {seeds} {'does' if delta.seeds == 1 else 'do'} not tell from zero{worse}"


def without_softmax(rows: Sequence[Row]) -> str:
    best = rows[0]
    if len(rows) == 1:
        return f"{best.name} scored {accuracy(best.top1.mean)} top-1, and there is nothing to compare it with yet."
    text = f"Softmax was not trained here, so nothing is said against it: {best.name} scored highest,"
    text += f" {accuracy(best.top1.mean)} top-1"
    close = [row.name for row in rows[1:] if row.interval and row.interval[1] >= best.top1.mean]
    return f"{text}, which lies within the intervals of {listing(close)}." if close else f"{text}."
