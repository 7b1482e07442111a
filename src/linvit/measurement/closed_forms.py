"""Closed forms that the Monte Carlo of `theory` is held against. q and k are standard normal of width d throughout.

MixA's theorems 5.1 to 5.3 give orders of growth; the exact constants here are ours, and so is the correction of the
constant in 5.3. The paper's own is kept as `relu_product_variance_as_printed`, to show that it is wrong.
"""

from math import comb, exp, lgamma, pi, sqrt

import numpy as np
from numpy.typing import NDArray


def relu_product_mean(d: int) -> float:
    """E[relu(q)·relu(k)] = d/2π, which the theorems leave out: E[relu] = 1/√2π for each factor."""
    return d / (2 * pi)


def relu_product_variance(d: int) -> float:
    """Theorem 5.3, corrected: each channel has second moment 1/2 · 1/2 and mean 1/2π, so Var = d(1/4 − 1/4π²)."""
    return d * (1 / 4 - 1 / (4 * pi**2))


def relu_product_variance_as_printed(d: int) -> float:
    """Theorem 5.3 as the paper prints it, d(1/4 − 1/2π): the square of the mean lost its square."""
    return d * (1 / 4 - 1 / (2 * pi))


def sum_variance(d: int, tokens: int, correlation: float = 0.0) -> float:
    """Theorem 5.2: Var(Σ_j A_j v_j) with A_j = relu(q)·relu(k_j) and unit-variance values of a given correlation
    between tokens. Independent values grow with N, correlated ones with N²."""
    second = relu_product_variance(d) + relu_product_mean(d) ** 2
    shared = (d * (1 / 2 - 1 / (2 * pi)) + d**2 / (2 * pi)) / (2 * pi)  # E[A_j A_l], j ≠ l: the same query
    return tokens * second + correlation * tokens * (tokens - 1) * shared


def stella_row_sum(d: int) -> float:
    """Mean row sum of SteLLA's map: N products of mean d/2π over N√d."""
    return sqrt(d) / (2 * pi)


def stella_output_std(d: int, tokens: int, correlation: float = 0.0) -> float:
    return sqrt(sum_variance(d, tokens, correlation)) / (tokens * sqrt(d))


def relu_quadratic_row_sum(d: int) -> float:
    """Mean row sum of relu(q·k/√d)/N: E‖q‖/√d · 1/√2π, near 0.4."""
    return sqrt(2) * exp(lgamma((d + 1) / 2) - lgamma(d / 2)) / sqrt(d) / sqrt(2 * pi)


def angular(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Castling's kernel 1 − θ/π at x = cos θ."""
    return 1 - np.arccos(x) / pi


def angular_series(x: NDArray[np.float64], order: int) -> NDArray[np.float64]:
    """Its series up to x^order: ½ + x/π + …; order 1 is the linear part."""
    total = np.full_like(x, 0.5)
    for k in range((order + 1) // 2):
        total = total + comb(2 * k, k) / (4**k * (2 * k + 1)) / pi * x ** (2 * k + 1)
    return total


def angular_residual_rms(d: int, order: int = 1) -> float:
    """Root mean square of kernel minus series over random q and k, by quadrature: cos θ has density ∝ sin^(d−2) θ."""
    theta = np.linspace(0, pi, 20_001)[1:-1]
    x, density = np.cos(theta), np.sin(theta) ** (d - 2)
    return float(np.sqrt(np.sum(density * (angular(x) - angular_series(x, order)) ** 2) / np.sum(density)))


def rotary_mean(d: int, apart: int, base: float = 100.0) -> float:
    """E[R φ(q)·φ(k)] over E[φ(q)·φ(k)] for equally distributed positive features, `apart` columns apart: the mean of
    the cosines, of which those for the rows are 1. What is skew in a turned pair of channels averages out."""
    speeds = base ** -np.arange(0, 1, 4 / d)
    return float((1 + np.cos(speeds * apart).mean()) / 2)


def softmax_kernel_mean(d: int) -> float:
    """E[exp(q·k/√d)] = (1 − 1/d)^(−d/2), which tends to √e."""
    return float((1 - 1 / d) ** (-d / 2))


TAYLOR_MEAN = 1.5  # E[1 + x + x²/2] at x = q·k/√d; the compact form has the same mean


def taylor_variance(d: int) -> float:
    """Var(1 + x + x²/2), from E[x⁴] = 3(d + 2)/d."""
    return (3 * (d + 2) / d - 1 + 4) / 4


def compact_variance(d: int) -> float:
    """Var(½·Σ q²k²/d + 1): the squares alone, d independent terms of variance 8."""
    return 2 / d


def compact_error(d: int) -> float:
    """Mean square of exact minus compact: the linear term and the cross products, which compact drops."""
    return 1.5 - 1 / (2 * d)
