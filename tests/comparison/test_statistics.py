"""Few seeds, said honestly: against independent computations and by properties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from linvit.comparison.statistics.estimates import Scored, difference, estimate, fit_exponent, kendall, pareto_front
from linvit.errors import LinvitError

accuracies = st.floats(0, 100, allow_nan=False)


def totals(*accuracies: float) -> dict[int, Scored]:
    """By seed, without the images."""
    return {seed: (top1, None) for seed, top1 in enumerate(accuracies)}


@settings(deadline=None)
@given(st.lists(accuracies, min_size=2, max_size=8))
def test_interval_is_students(values: list[float]) -> None:
    found = estimate(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.standard_error == pytest.approx(stats.sem(values), abs=1e-9)
    assert found.interval is not None
    low, high = found.interval
    assert low <= found.mean + 1e-9 and found.mean - 1e-9 <= high
    if found.standard_error and found.standard_error > 1e-6:
        expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
        assert (low, high) == pytest.approx(expected)


def test_three_seeds_are_few() -> None:
    found = estimate([80.0, 81.0, 82.0])
    assert found.interval == pytest.approx((81 - 4.302653 / math.sqrt(3), 81 + 4.302653 / math.sqrt(3)), rel=1e-6)


def test_one_seed_has_no_interval() -> None:
    found = estimate([80.0])
    assert (found.mean, found.standard_error, found.interval) == (80.0, None, None)
    with pytest.raises(LinvitError, match="nothing"):
        estimate([])


def test_difference_of_totals_is_the_paired_t() -> None:
    found = difference(totals(88.0, 87.0, 89.5), totals(87.0, 86.5, 87.5, 10.0))
    assert found is not None and found.images == 0 and found.seeds == 3
    expected = stats.ttest_rel([88, 87, 89.5], [87, 86.5, 87.5]).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(3.5 / 3)


def test_difference_over_images_sees_what_totals_do_not() -> None:
    rng = np.random.default_rng(0)
    base = rng.random((3, 400)) < 0.8
    better = base | (rng.random((3, 400)) < 0.15)
    right, wrong = ({s: (100 * float(row.mean()), row) for s, row in enumerate(side)} for side in (better, base))
    found = difference(right, wrong)
    assert found is not None and found.images == 400 and found.clear
    assert found.mean == pytest.approx(100 * (better.mean() - base.mean()))
    turned = difference(wrong, right)
    assert turned is not None and found.interval is not None
    assert turned.interval == pytest.approx((-found.interval[1], -found.interval[0]))


def test_difference_falls_back_where_images_do_not_match() -> None:
    four, five = ({0: (80.0, np.ones(n)), 1: (81.0, np.ones(n))} for n in (4, 5))
    found = difference(four, five)
    assert found is not None and found.images == 0 and found.mean == 0
    some = {0: (80.0, np.ones(4)), 1: (81.0, None)}
    found = difference(some, some)
    assert found is not None and found.images == 0 and found.seeds == 2
    assert difference({0: (1.0, None)}, {1: (1.0, None)}) is None


def test_one_shared_seed_without_images_says_nothing_of_its_error() -> None:
    found = difference(totals(81.0, 82.0), {1: (80.0, None)})
    assert found is not None and found.mean == 2.0 and found.interval is None and not found.clear


@settings(deadline=None)
@given(st.floats(0.2, 3), st.floats(1e-3, 1e3), st.integers(2, 7))
def test_exponent_of_a_power_is_found(exponent: float, factor: float, points: int) -> None:
    x = [2.0**i for i in range(points)]
    found = fit_exponent((value, factor * value**exponent) for value in x)
    assert found is not None
    assert found.exponent == pytest.approx(exponent)
    assert (found.interval is None) == (points == 2)
    assert found.points == min(points, max(3, (points + 1) // 2))


def test_exponent_with_its_interval() -> None:
    x, y = [256, 1024, 4096, 16384], [1.0, 2.2, 8.1, 33.0]
    found = fit_exponent(zip(x, y, strict=True))
    design = np.stack([np.ones(3), np.log(x[1:])], axis=1)
    solved, residual, *_ = np.linalg.lstsq(design, np.log(y[1:]), rcond=None)
    spread = math.sqrt(residual[0] / 1 * np.linalg.inv(design.T @ design)[1, 1])
    half = stats.t.ppf(0.975, 1) * spread
    assert found is not None and found.points == 3
    assert found.exponent == pytest.approx(solved[1])
    assert found.interval == pytest.approx((solved[1] - half, solved[1] + half))


def test_exponent_needs_two_sizes() -> None:
    assert fit_exponent([]) is None
    assert fit_exponent([(4, 1)]) is None
    assert fit_exponent([(4, 1), (4, 2)]) is None
    assert fit_exponent([(4, 0), (8, 2)]) is None


points = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


@settings(deadline=None)
@given(points)
def test_front_is_what_nobody_beats(found: list[tuple[int, int]]) -> None:
    costs, gains = [cost for cost, _ in found], [gain for _, gain in found]

    def beaten(i: int) -> bool:
        return any(
            costs[j] <= costs[i] and gains[j] >= gains[i] and (costs[j], gains[j]) != (costs[i], gains[i])
            for j in range(len(found))
        )

    front = pareto_front(costs, gains)
    assert sorted(front) == [i for i in range(len(found)) if not beaten(i)]
    assert [costs[i] for i in front] == sorted(costs[i] for i in front)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=9))
def test_kendall_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    assume(len(set(a)) > 1 and len(set(b)) > 1)
    signs = [np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]) for i, j in itertools.combinations(range(len(a)), 2)]
    untied = [sum(x[i] != x[j] for i, j in itertools.combinations(range(len(a)), 2)) for x in (a, b)]
    found = kendall(a, b)
    assert found is not None
    assert found[0] == pytest.approx(sum(signs) / math.sqrt(untied[0] * untied[1]))
    assert 0 <= found[1] <= 1


def test_kendall_is_exact_for_few() -> None:
    found = kendall([1, 2, 3, 4], [10, 20, 30, 40])
    assert found is not None and found[0] == pytest.approx(1)
    assert found[1] == pytest.approx(2 / math.factorial(4))
    assert kendall([1, 2], [1, 2]) is None
    assert kendall([1, 1, 1], [1, 2, 3]) is None
