"""Accuracy against speed as points to draw: a panel for each setting of stores, at its own size."""

from collections.abc import Sequence
from pathlib import Path

from linvit.comparison.reporting.answer import clock_of, gather, main_rows, side_by_side
from linvit.comparison.reporting.wording import metric_name
from linvit.comparison.statistics.estimates import pareto_front
from linvit.comparison.statistics.rows import CandidateRow, Setting
from linvit.figures.pareto import Panel, ParetoPoint


def fronts(stores: Sequence[str | Path]) -> list[Panel]:
    """Throughput beside softmax's where it was measured for at least two candidates, else MACs."""
    return [panel for setting in gather(stores).settings if (panel := front(setting)) is not None]


def front(setting: Setting) -> Panel | None:
    rows = [row for row in main_rows(setting) if not row.is_teacher]
    clock = clock_of(rows, many=True)
    timed = [(row, ratio) for row in rows if (ratio := side_by_side(row, clock))]
    if len(timed) > 1:
        assert clock is not None
        points, costs = timed, [1 / ratio for _, ratio in timed]
        xlabel, note = "throughput, softmax's is 1", f"Timed on {clock.chip}."
    else:
        points = [(row, row.first.model.macs / 1e9) for row in rows if row.first.model.macs]
        costs, xlabel, note = [x for _, x in points], "GMACs", ""
    if not points:
        return None
    best = set(pareto_front(costs, [row.score.mean for row, _ in points]))
    found = [candidate(row, x, place in best) for place, (row, x) in enumerate(points)]
    return Panel(setting.title, xlabel, f"{metric_name(setting.metric)}, %", found, note)


def candidate(row: CandidateRow, x: float, on_front: bool) -> ParetoPoint:
    low, high = row.interval or (None, None)
    return ParetoPoint(row.name, float(x), row.score.mean, low, high, on_front)
