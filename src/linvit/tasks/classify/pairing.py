"""The difference of two models, image by image and seed by seed, with its interval.

A run differs from the next by its seed, and a test set from the next by its images; the same seeds and images for both
models take much of either out of the difference. With d[s, i] = (a right) − (b right) for seed s and image i, and the
two-way model d = μ + seed + image + rest, the variance of the mean over S seeds and I images is

    (MS_seed + MS_image − MS_rest) / (S·I)

from the mean squares of the table, and its degrees of freedom are Satterthwaite's. The interval is Student's t. With
one seed only images vary. Beside it stands the interval for these very images, which the seeds alone decide (paired t
over the seeds' means): use it for what was measured, the wider one for what is claimed of other images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from linvit.errors import LinvitError


@dataclass(frozen=True)
class PairedDifference:
    """In points of accuracy, a minus b."""

    mean: float
    interval: tuple[float, float]  # over seeds and images
    seeds_interval: tuple[float, float] | None  # over seeds, for these images; none with a single seed
    seeds: int
    images: int


def paired_difference(a: Any, b: Any, *, level: float = 0.95) -> PairedDifference:
    """How much better a is than b. Both are tables of right and wrong, `(seeds, images)` or `(images,)`, whose rows
    belong together seed by seed and whose columns are the same images."""
    first, second = (np.atleast_2d(np.asarray(table, dtype=np.float64)) for table in (a, b))
    if first.shape != second.shape or first.size == 0:
        raise LinvitError(f"cannot pair results of shape {first.shape} and {second.shape}: same seeds, same images")
    table = 100 * (first - second)
    seeds, images = table.shape
    if images < 2:
        raise LinvitError("one image says nothing about a difference")
    mean = float(table.mean())
    rows, columns = table.mean(1), table.mean(0)
    if seeds == 1:
        return PairedDifference(mean, around(mean, table.var(ddof=1) / images, images - 1, level), None, 1, images)
    of_seeds, of_images = images * rows.var(ddof=1), seeds * columns.var(ddof=1)
    rest = table - rows[:, None] - columns + mean
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (images - 1))
    total = max(of_seeds + of_images - of_rest, of_seeds, of_images)  # the sum falls below its parts only by chance
    parts = of_seeds**2 / (seeds - 1) + of_images**2 / (images - 1)
    freedom = total**2 / parts if parts > 0 else float(seeds - 1)
    whole = around(mean, total / table.size, freedom, level)
    return PairedDifference(mean, whole, around(mean, rows.var(ddof=1) / seeds, seeds - 1, level), seeds, images)


def around(mean: float, variance: float, freedom: float, level: float) -> tuple[float, float]:
    half = float(stats.t.ppf((1 + level) / 2, freedom) * np.sqrt(variance))
    return mean - half, mean + half
