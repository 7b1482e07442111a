"""What a handful of seeds can say: means with Student's intervals, paired differences, exponents, fronts and ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from linvit.errors import LinvitError
from linvit.tasks.classify.metrics import around, paired_difference

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its error over seeds; a single seed has neither error nor interval."""

    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Difference:
    """a minus b. `interval` is over seeds and images where each image's result is known, else over seeds alone."""

    mean: float
    interval: tuple[float, float] | None
    seeds_interval: tuple[float, float] | None  # for these very images
    seeds: int
    images: int  # 0: only the runs' totals are known

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True)
class Fit:
    """y grows as x to the `exponent`; the interval needs three points or more."""

    exponent: float
    interval: tuple[float, float] | None
    points: int


Scored = tuple[float, np.ndarray | None]  # an accuracy, and which images were right where that is known


def average(values: Iterable[float | None]) -> float | None:
    """The mean of those that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over seeds with Student's interval, which is wide for few of them, as it should be."""
    if not len(values):
        raise LinvitError("there is nothing to take the mean of")
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Estimate(mean, None, None)
    variance = float(np.var(values, ddof=1)) / count
    return Estimate(mean, variance**0.5, around(mean, variance, count - 1, LEVEL))


def difference(a: Mapping[int, Scored], b: Mapping[int, Scored]) -> Difference | None:
    """How much better a is than b over the seeds they share, or None where they share none. Where it is known for all
    of them which images were right, and the images are the same, the difference is paired over images as well."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    bits = [[side[seed][1] for seed in seeds] for side in (a, b)]
    images = {0 if right is None else len(right) for side in bits for right in side}
    if len(images) == 1 and min(images) > 1:
        found = paired_difference(*bits, level=LEVEL)
        return Difference(found.mean, found.interval, found.seeds_interval, found.seeds, found.images)
    over = estimate([a[seed][0] - b[seed][0] for seed in seeds])
    return Difference(over.mean, over.interval, over.interval, len(seeds), 0)


def fit_exponent(given: Iterable[tuple[float, float]]) -> Fit | None:
    """The slope of log y over log x, of pairs of x and y, by least squares.

    It is fitted to the upper half of the ladder, three points at least where there are as many: what a call costs
    whatever its size would pull the exponent down at the lower end.
    """
    points = sorted((x, y) for x, y in given if x > 0 and y > 0)
    points = points[-max(3, (len(points) + 1) // 2) :]
    if len({x for x, _ in points}) < 2:
        return None
    logs = np.log(np.array(points, dtype=np.float64))
    line = stats.linregress(logs[:, 0], logs[:, 1])
    slope, variance, freedom = float(line.slope), float(line.stderr) ** 2, len(points) - 2
    return Fit(slope, around(slope, variance, freedom, LEVEL) if freedom else None, len(points))


def pareto_front(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Positions of the points that no other beats: none costs as little and gains more, nor gains as much for less.
    By rising cost."""
    order = sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i]))
    front: list[int] = []
    best = -np.inf
    for i in order:
        if gains[i] > best or (front and (costs[i], gains[i]) == (costs[front[-1]], gains[front[-1]])):
            front.append(i)
            best = gains[i]
    return front


def kendall(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """Whether two rankings of the same things agree: tau-b, and how often chance alone would be as far from zero. None
    where fewer than three, or one side, is ranked at all."""
    if len(a) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    found = stats.kendalltau(a, b)
    return float(found.statistic), float(found.pvalue)
