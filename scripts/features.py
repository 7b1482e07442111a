"""What brings a bare backbone back: every variant beside what it varies and beside the original, paired.

    python -m scripts.features STORE … [--page docs/results.md]

A variant is a mechanism with options, or a change of the recipe. It is compared with the plain mechanism under the
recipe as it is, seed by seed and image by image; intervals are of 95 %. With a page the tables go between its marks
`<!-- features -->` and `<!-- /features -->`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from linvit.comparison.reporting.wording import change
from linvit.comparison.results import Run
from linvit.comparison.statistics.estimates import Difference, average, difference
from linvit.comparison.statistics.reading import read
from linvit.comparison.statistics.rows import CandidateRow, to_teacher
from scripts.recovery import grid, number, splice
from scripts.variants import changes

Groups = dict[tuple[str, str], CandidateRow]  # by candidate and what of the recipe was changed
METRICS = {"knn": "kNN", "probe": "probe", "neighbours": "neighbours", "patch_cosine": "patch", "class_cosine": "class"}


def groups(runs: Iterable[Run]) -> Groups:
    """The runs of features; what all of them changed is the recipe here, and no variant."""
    chosen = [
        (run, changes(run.identity.config, "features").split()) for run in runs if run.identity.task == "features"
    ]
    shared = set.intersection(*(set(words) for _, words in chosen)) if chosen else set()
    found: dict[tuple[str, str], list[Run]] = {}
    for run, words in chosen:
        changed = " ".join(word for word in words if word not in shared)
        found.setdefault((run.label.candidate, changed), []).append(run)
    return {place: CandidateRow(mine) for place, mine in sorted(found.items(), key=lambda pair: pair[0])}


def base_of(found: Groups, candidate: str, changed: str) -> CandidateRow | None:
    """What a variant is compared with: of a mechanism's option the plain one, of a change of the recipe the same."""
    plain = candidate.partition(":")[0]
    place = (plain, changed) if plain != candidate else (candidate, "")
    return None if place == (candidate, changed) else found.get(place)


def between(row: CandidateRow, base: CandidateRow | None, metric: str) -> Difference | None:
    """The paired difference by a metric that both have."""
    if base is None or not all(metric in run.accuracy.metrics for each in (row, base) for run in each.runs):
        return None
    main = row.metric == metric
    ours, theirs = (
        {run.seed: (run.score, run.right) if main else run.right_by(metric) for run in each.runs}
        for each in (row, base)
    )
    return difference(ours, theirs)


def told(delta: Difference | None) -> str:
    return "" if delta is None else change(delta.mean, delta.interval)


def tables(found: Groups) -> str:
    """Where each came, how far that is from the original, and what each variant changed."""
    reached, compared = [], []
    for (candidate, changed), row in found.items():
        name, what = f"`{candidate}`", f"`{changed}`" if changed else ""
        values = [average(run.accuracy.metrics.get(metric) for run in row.runs) for metric in METRICS]
        apart = [told(to_teacher(row)), told(to_teacher(row, "probe"))]
        reached.append([name, what, str(len(row.runs)), *(number(value, 2) for value in values), *apart])
        deltas = [between(row, base_of(found, candidate, changed), metric) for metric in METRICS]
        compared.append([name, what, *map(told, deltas)])
    heads = ["candidate", "changed"]
    beside = ["kNN − original's", "probe − original's"]
    return "\n\n".join((
        "In percent, means over seeds: kNN, probe, nearest neighbours as the original's, cosines of patches and image.",
        grid([*heads, "seeds", *METRICS.values(), *beside], reached),
        "What a variant changed, in points, paired with what it varies:",
        grid([*heads, *METRICS.values()], [row for row in compared if any(row[2:])]),
    ))  # fmt: skip


def main(stores: list[Path], page: Path | None = None) -> None:
    text = tables(groups(read(stores).runs))
    if page is None:
        print(text)
    else:
        splice(page, "features", text)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("stores", type=Path, nargs="+")
    asked.add_argument("--page", type=Path, help="with a place for the tables")
    given = asked.parse_args()
    main(given.stores, given.page)
