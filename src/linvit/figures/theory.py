"""The theory as small multiples: points are measured, with their intervals; lines are closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linvit.figures.style import BLUE, GREY, INK, RED, picture
from linvit.measurement import closed_forms as closed
from linvit.measurement.theory import CORRELATION, HEAD_DIMS, ORDERS, TOKENS, Finding, Sampler, taylor_pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Findings = Sequence[Finding]


def plot_theory(findings: Findings, path: Path) -> None:
    """Draw what `linvit.measurement.theory` found."""
    panels = {
        "5.1  variance of q·k": products,
        "5.2  variance of the sum over tokens": sums,
        "5.3  variance of relu(q)·relu(k)": relu_products,
        "What it means: row sums of the map": row_sums,
        "Castling  what the series leaves out": angular,
        "QT  kernel at d = 64": taylor,
    }
    with picture(path, 10, 5.6) as figure:
        for (title, panel), ax in zip(panels.items(), figure.subplots(2, 3).flatten(), strict=True):
            panel(ax, findings)
            ax.set_title(title)
            ax.legend(loc="upper left")
        note = "Points: Monte Carlo with 95 % intervals, mostly smaller than the point. Lines: closed forms."
        figure.supxlabel(note, fontsize=8, color=INK)


def points(
    ax: Axes, findings: Findings, quantity: str, along: str | float, *, colour: str = BLUE, power: int = 0
) -> None:
    """Measured values of one quantity with their intervals, times tokens to a power; along a field of the findings, or
    at one place."""
    chosen = [f for f in findings if f.quantity == quantity]
    x = [getattr(f, along) if isinstance(along, str) else along for f in chosen]
    scale = [(f.tokens or 1) ** power for f in chosen]
    y = [f.measured * s for f, s in zip(chosen, scale, strict=True)]
    bars = [f.width * f.error * s for f, s in zip(chosen, scale, strict=True)]
    ax.errorbar(x, y, bars, fmt="o", ms=4.5, color=colour, mec="white", mew=0.6, elinewidth=1.2, zorder=3)


def by_head_dim(ax: Axes) -> np.ndarray:
    ax.set(xlabel="head dim d", xticks=HEAD_DIMS)
    return np.linspace(8, 136, 60)


def products(ax: Axes, findings: Findings) -> None:
    d = by_head_dim(ax)
    ax.plot(d, d, color=INK, lw=1.2, label="closed form: d")
    points(ax, findings, "Var(q·k)", "d")


def sums(ax: Axes, findings: Findings) -> None:
    tokens = np.geomspace(TOKENS[0] / 1.5, TOKENS[-1] * 1.5, 40)
    cases = (("correlated v: ∝ N²", "N²", "correlated", CORRELATION, RED), ("iid v: ∝ N", "N", "iid", 0.0, BLUE))
    for label, unit, name, correlation, colour in cases:
        ax.plot(tokens, [closed.sum_variance(64, n, correlation) for n in tokens], color=colour, lw=1.2, label=label)
        points(ax, findings, f"Var(Σ A·v)/{unit}, {name} v", "tokens", colour=colour, power=len(unit))
    ax.set(xscale="log", yscale="log", xlabel="tokens N")
    ax.set_xticks(TOKENS, [str(n) for n in TOKENS])
    ax.minorticks_off()


def relu_products(ax: Axes, findings: Findings) -> None:
    d = by_head_dim(ax)
    ax.plot(d, closed.relu_product_variance(1) * d, color=INK, lw=1.2, label="d(1/4 − 1/4π²)")
    printed = closed.relu_product_variance_as_printed(1) * d
    ax.plot(d, printed, color=RED, lw=1.2, ls="--", label="as printed: d(1/4 − 1/2π)")
    points(ax, findings, "variance", "d")


def row_sums(ax: Axes, findings: Findings) -> None:
    d = by_head_dim(ax)
    ax.axhline(1, color=GREY, lw=1.2, ls=":", label="softmax: 1")
    ax.plot(d, np.sqrt(d) / (2 * np.pi), color=INK, lw=1.2, label="SteLLA: √d/2π")
    ax.plot(d, [closed.relu_quadratic_row_sum(n) for n in d], color=RED, lw=1.2, label="ReLU-quadratic: about 0.4")
    points(ax, findings, "row sum of stella", "d")
    points(ax, findings, "row sum of relu_quadratic", "d", colour=RED)
    ax.set(ylim=(0, 2.6))


def angular(ax: Axes, findings: Findings) -> None:
    from matplotlib import colormaps

    x = np.linspace(0, 1, 200)
    for order, shade in zip(ORDERS, np.linspace(0.9, 0.35, len(ORDERS)), strict=True):
        residual = closed.angular(x) - closed.angular_series(x, order)
        label = "order 1, the linear part" if order == 1 else f"order {order}"
        ax.plot(x, residual, color=colormaps["Blues"](shade), lw=1.4, label=label)
        points(ax, findings, f"residual at x = 0.9, order {order}", 0.9, colour=INK)
    ax.set(xlabel="x = cos θ")


def taylor(ax: Axes, findings: Findings) -> None:
    x = np.linspace(-2.6, 2.6, 100)
    at, compact = taylor_pairs(Sampler(400, 0), 64)
    ax.plot(x, np.exp(x), color=GREY, lw=1.2, ls=":", label="softmax: exp(x)")
    ax.plot(x, 1 + x + x**2 / 2, color=INK, lw=1.2, label="exact: 1 + x + x²/2")
    ax.plot(at, compact, "o", ms=2.2, color=BLUE, alpha=0.5, mew=0, label="compact, random pairs")
    ax.set(xlabel="x = q·k/√d", xlim=(-2.6, 2.6), ylim=(0, 8))
