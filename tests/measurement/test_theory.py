"""The closed forms against independent arithmetic, and the Monte Carlo against the closed forms."""

from __future__ import annotations

from math import e, factorial, pi, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch

from linvit.errors import LinvitError
from linvit.figures import plot_theory
from linvit.measurement import closed_forms as closed
from linvit.measurement.theory import PARTS, TOPICS, Finding, mean, measure, variance


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return measure(samples=20_000, seed=0)


def test_every_closed_form_holds(findings: list[Finding]) -> None:
    outside = [f for f in findings if f.inside is False and not f.wrong]
    assert not outside
    assert {f.topic for f in findings} == set(TOPICS)
    assert sum(f.inside is True for f in findings) >= 45


def test_the_printed_constant_is_rejected(findings: list[Finding]) -> None:
    printed = [f for f in findings if f.wrong]
    assert [f.d for f in printed] == [16, 32, 64, 128]
    assert all(f.inside is False and (f.deviation or 0) > 30 for f in printed)


def test_growth_with_tokens(findings: list[Finding]) -> None:
    growth = {f.quantity: f.measured for f in findings if f.quantity.startswith("p of")}
    assert growth["p of Var ∝ N^p, iid v"] == pytest.approx(1, abs=0.05)
    assert growth["p of Var ∝ N^p, correlated v"] == pytest.approx(2, abs=0.05)


def test_intervals_hold_together(findings: list[Finding]) -> None:
    """Wider than 1.96 standard errors, as there are many rows; an identity has none."""
    assert all(3 < f.width < 4 for f in findings)
    identity = [f for f in findings if "identity" in f.quantity]
    assert identity and all(f.error == 0 and f.measured < 1e-12 and f.inside for f in identity)


def test_single_intervals_cover_as_often_as_they_say() -> None:
    """Over many seeds, about one row in twenty lies more than 1.96 standard errors off."""
    far = [
        (f.deviation or 0) > 1.96 for seed in range(1, 7) for f in measure(10_000, seed) if f.deviation and not f.wrong
    ]
    assert len(far) > 250
    assert 0.01 < sum(far) / len(far) < 0.1


def test_same_seed_same_numbers() -> None:
    assert measure(10_000, 3) == measure(10_000, 3)
    assert measure(10_000, 3) != measure(10_000, 4)


def test_too_few_samples() -> None:
    with pytest.raises(LinvitError, match="at least 10000"):
        measure(9_999)


def test_progress_advances_once_a_part() -> None:
    calls: list[None] = []
    measure(10_000, 0, lambda: calls.append(None))
    assert len(calls) == len(PARTS)


def test_relu_moments_by_quadrature() -> None:
    """E[relu] and E[relu²] by integration give 5.3's mean and variance, and not the printed constant."""
    x = np.linspace(0, 12, 200_001)
    density = np.exp(-(x**2) / 2) / sqrt(2 * pi)
    first, second = np.trapezoid(x * density, x), np.trapezoid(x**2 * density, x)
    assert closed.relu_product_mean(7) == pytest.approx(7 * first**2)
    assert closed.relu_product_variance(7) == pytest.approx(7 * (second**2 - first**4))
    assert closed.relu_product_variance(1) == pytest.approx(0.22467, abs=1e-5)
    assert closed.relu_product_variance_as_printed(1) == pytest.approx(0.09085, abs=1e-5)


def test_golden_scales() -> None:
    assert closed.stella_row_sum(64) == pytest.approx(1.273, abs=5e-4)
    assert closed.stella_row_sum(32) == pytest.approx(0.900, abs=5e-4)
    assert closed.relu_quadratic_row_sum(10_000) == pytest.approx(1 / sqrt(2 * pi), abs=1e-5)
    assert closed.softmax_kernel_mean(10**6) == pytest.approx(sqrt(e), abs=1e-5)


@pytest.mark.parametrize("order", [1, 3, 5, 9])
def test_angular_series_has_the_papers_coefficients(order: int) -> None:
    x = np.linspace(-1, 1, 11)
    terms = range(1, (order - 1) // 2 + 1)
    series = sum(
        (factorial(2 * k) / (4**k * factorial(k) ** 2 * (2 * k + 1)) * x ** (2 * k + 1) for k in terms), np.zeros(11)
    )
    np.testing.assert_allclose(closed.angular_series(x, order), 0.5 + x / pi + series / pi)


def test_angular_residuals() -> None:
    residual = closed.angular(np.array([0.3, 0.9, 1.0])) - closed.angular_series(np.array([0.3, 0.9, 1.0]), 1)
    np.testing.assert_allclose(residual, [0.0015, 0.0700, 0.1817], atol=5e-5)
    whole = closed.angular_series(np.array([0.9]), 199)
    np.testing.assert_allclose(whole, closed.angular(np.array([0.9])), atol=1e-10)
    assert closed.angular_residual_rms(64) < closed.angular_residual_rms(16)
    assert closed.angular_residual_rms(16, 3) < closed.angular_residual_rms(16, 1)


def test_estimators() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    value, error = mean(x)
    assert abs(value - 1) < 4 * error and error == pytest.approx(3 / sqrt(50_000), rel=0.02)
    value, error = variance(x)
    assert abs(value - 9) < 4 * error and error == pytest.approx(9 * sqrt(2 / 50_000), rel=0.05)


@pytest.mark.parametrize("suffix, magic", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_plot_in_every_format(findings: list[Finding], tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"theory{suffix}"
    plot_theory(findings, path)
    assert path.read_bytes().startswith(magic)
