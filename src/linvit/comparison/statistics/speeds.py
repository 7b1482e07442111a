"""Speeds of one candidate as ladders over tokens, on softmax's scale.

A ratio was taken by turns with softmax in one job; times of two jobs were not, and a clock or a neighbour may have
changed between them. So times are compared on softmax's scale only: softmax's own time divided by the ratio.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from linvit.comparison.results import Speed, SpeedPoint
from linvit.comparison.statistics.estimates import Fit, fit_exponent


@dataclass(frozen=True)
class Ladder:
    """A candidate on one chip, in one pass, one image at a time or many: its ladder and how it grows."""

    device: str
    chip: str  # and how it was used: what a time must not be compared without
    what: str
    many: bool  # the batch of throughput, not one image
    points: tuple[SpeedPoint, ...]  # by tokens
    times: tuple[float | None, ...]  # ms an image on softmax's scale; where that has no time, as it was measured alone
    astray: dict[int, float]  # size: softmax's time in its own job over that in this one, where they disagree
    time: Fit | None
    memory: Fit | None

    def same_clock(self, other: "Ladder") -> bool:
        """Whether two candidates were timed on the same chip in the same way."""
        return (self.chip, self.what, self.many) == (other.chip, other.what, other.many)


def ladders(speeds: Iterable[Speed]) -> list[Ladder]:
    """As they were measured, each alone."""
    timed = [(point, chip_of(speed, point)) for speed in speeds for point in speed.rows]
    found: dict[tuple[str, str, str, bool], dict[int, SpeedPoint]] = defaultdict(dict)
    for point, chip in sorted(timed, key=lambda row: (row[0].tokens, row[0].batch)):
        found[point.device, chip, point.what, point.batch > 1].setdefault(point.size, point)
    made = []
    for which, at_size in sorted(found.items()):
        points = tuple(at_size.values())
        memory = fit_exponent((p.tokens, p.peak_bytes / p.batch) for p in points if p.peak_bytes is not None)
        made.append(fitted(Ladder(*which, points, tuple(map(per_image, points)), {}, None, memory)))
    return made


def normalised(ladder: Ladder, softmax: Sequence[Ladder]) -> Ladder:
    """The same on the scale of softmax's ladder by this clock, if it is among these."""
    base = next((found for found in softmax if found.same_clock(ladder)), None)
    if base is None:
        return ladder
    at = {point.size: point for point in base.points}
    times = tuple(on_scale(point, at.get(point.size)) for point in ladder.points)
    found = {point.size: disagreement(point, at.get(point.size)) for point in ladder.points}
    astray = {size: factor for size, factor in found.items() if factor is not None}
    return fitted(replace(ladder, times=times, astray=astray))


def fitted(ladder: Ladder) -> Ladder:
    pairs = zip(ladder.points, ladder.times, strict=True)
    return replace(ladder, time=fit_exponent((point.tokens, time) for point, time in pairs if time is not None))


def per_image(point: SpeedPoint | None) -> float | None:
    """Milliseconds an image, as they were measured."""
    return None if point is None or point.median is None else point.median / point.batch


def on_scale(point: SpeedPoint, softmax: SpeedPoint | None) -> float | None:
    own, base = per_image(point), per_image(softmax)
    return base / point.ratio if own is not None and base is not None and point.ratio else own


def disagreement(point: SpeedPoint, softmax: SpeedPoint | None) -> float | None:
    """Softmax's time in its own job over that in this one, which the ratio tells, where they lie further apart than
    their spread. Of softmax in this job only the median is kept: its spread is taken to be the candidate's."""
    own, base = point.milliseconds, softmax.milliseconds if softmax else None
    if own is None or base is None or softmax is None or not point.ratio or not own.median:
        return None
    here, there = point.ratio / point.batch, 1 / softmax.batch
    apart = own.low * here > base.high * there or own.high * here < base.low * there
    return base.median * there / (own.median * here) if apart else None


def chip_of(speed: Speed, point: SpeedPoint) -> str:
    """A chip as people name it, without the maker's ornaments, and how it was used."""
    ornaments = r"\(R\)|\(TM\)| Processor| CPU| with Radeon Graphics| \d+-Core\b"
    name = re.sub(ornaments, "", speed.chip(point))
    return ", ".join([f"CPU {name}" if point.device == "cpu" else name, *use_of(point)])


def use_of(point: SpeedPoint) -> list[str]:
    """In which precision, and how."""
    ways = (("compiled", point.compiled), ("CUDA graph", point.cuda_graph))
    return [name for name in (point.precision, *(way for way, taken in ways if taken)) if name]
