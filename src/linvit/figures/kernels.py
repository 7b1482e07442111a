"""How alike a query and a key are, to each mechanism: over the angle between them, and over their product.

The curves come from the mechanisms' own feature maps, on random pairs; where the similarity is no function of the angle
alone, the mean over pairs is drawn, and the middle eight tenths as a band.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linvit.attention import Call, LinearAttention, Mechanism, TokenGrid, create_attention
from linvit.figures.style import COLOURS, INK, picture

ANGLES, PAIRS, WIDEST = 91, 400, 3.0  # points of a curve, pairs for each, and the largest product drawn
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
# What is drawn over the angle and over the product, by its name in the legend.
OVER_ANGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "ReLU linear": ("relu_linear", {}),
    "angular, exact": ("angular", {"variant": "output_norm"}),
    "angular, linear (castling)": ("castling", {}),
    "QT, released": ("qt", {}),
}
OVER_PRODUCT: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax: exp(x)": ("softmax", {}),
    "Taylor 1: 1 + x": ("taylor", {}),
    "Taylor 2: 1 + x + x²/2 (QT, exact)": ("qt", {"variant": "exact"}),
    "ReLU: max(x, 0)": ("relu_quadratic", {}),
}


@dataclass(frozen=True)
class Curve:
    """A similarity over x: the mean over pairs, and where eight tenths of them lie."""

    name: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def similarity(mechanism: Mechanism, q: Tensor, k: Tensor) -> Tensor:
    """What a mechanism makes of pairs `(pairs, d)` before it normalises, `(pairs,)`."""
    call = Call(TokenGrid.line(1), TokenGrid.line(1))
    q, k = q[None, :, None], k[None, :, None]  # every pair a head of one token: nothing is summed over tokens
    if mechanism.name == "taylor":  # which centres the keys, and of one key nothing is left
        return 1 + (q * k).sum(-1)[0, :, 0] * q.shape[-1] ** -0.5
    if mechanism.name == "softmax":
        return (q * k).sum(-1)[0, :, 0].mul(q.shape[-1] ** -0.5).exp()
    if mechanism.name == "castling":  # the ½ of the kernel it takes for the token's own value
        return 0.5 + (q * k).sum(-1)[0, :, 0] / (math.pi * q.norm(dim=-1) * k.norm(dim=-1))[0, :, 0]
    if isinstance(mechanism, LinearAttention):
        phi_q, phi_k = mechanism.features(q, k, call)
        return (phi_q * phi_k).sum(-1)[0, :, 0]
    return mechanism.implied_map(q, k, call)[0, :, 0, 0]


@torch.no_grad()
def over_angle(head_dim: int = 64, seed: int = 0) -> list[Curve]:
    """Similarities over the angle in degrees, as shares of the mean at no angle, of pairs as long as random ones."""
    degrees = np.linspace(0, 180, ANGLES)
    return curves(OVER_ANGLE, degrees, np.cos(np.radians(degrees)), head_dim, seed, shares=True)


@torch.no_grad()
def over_product(head_dim: int = 64, seed: int = 0) -> list[Curve]:
    """Similarities over x = q · k/√d."""
    x = np.linspace(-WIDEST, WIDEST, ANGLES)
    return curves(OVER_PRODUCT, x, x / math.sqrt(head_dim), head_dim, seed, shares=False)


def curves(
    drawn: dict[str, tuple[str, dict[str, Any]]], x: np.ndarray, cosines: np.ndarray, head_dim: int, seed: int,
    *, shares: bool,
) -> list[Curve]:  # fmt: skip
    pairs = pairs_at(cosines, head_dim, seed)
    found = []
    for name, (mechanism, options) in drawn.items():
        built = create_attention(mechanism, heads=PAIRS, head_dim=head_dim, **options).double()
        values = torch.stack([similarity(built, q, k) for q, k in pairs]).numpy()
        values = values / values[0].mean() if shares else values
        low, high = np.quantile(values, (0.1, 0.9), axis=1)
        found.append(Curve(name, x, values.mean(1), low, high))
    return found


def pairs_at(cosines: np.ndarray, head_dim: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random pairs of each cosine, in the same directions, both of the length √d that random vectors of variance one
    have."""
    generator = torch.Generator().manual_seed(seed)
    q, other = (torch.randn(PAIRS, head_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    q = q / q.norm(dim=-1, keepdim=True)
    other = other - (other * q).sum(-1, keepdim=True) * q
    other = other / other.norm(dim=-1, keepdim=True)
    length = math.sqrt(head_dim)
    return [(length * q, length * (x * q + math.sqrt(max(0.0, 1 - x**2)) * other)) for x in cosines.tolist()]


def plot_kernels(path: Path, angle: Sequence[Curve], product: Sequence[Curve], head_dim: int) -> None:
    """What `over_angle` and `over_product` found for a head of this width, beside each other."""
    with picture(path, 8.6, 3.6) as figure:
        left, right = figure.subplots(1, 2)
        for panel, found in ((left, angle), (right, product)):
            for place, curve in enumerate(found):
                colour = COLOURS[place]
                if np.abs(curve.high - curve.low).max() > 1e-6:
                    panel.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
                panel.plot(curve.x, curve.mean, color=colour, linestyle=LINES[place], linewidth=1.6, label=curve.name)
            panel.axhline(0, color=INK, linewidth=0.6)
            panel.grid()
        left.legend(loc="upper center", ncols=2)
        right.legend(loc="upper left")
        left.set(title="Over the angle", xlabel="angle between query and key, degrees", xticks=range(0, 181, 45))
        left.set_ylim(-0.08, 1.72)
        left.set_ylabel("similarity, that at no angle is 1")
        right.set(title="Over the product", xlabel="x = q·k/√d", ylabel="similarity", ylim=(-2.2, 9))
        note = (
            f"d = {head_dim}, pairs of length √d. Bands: the middle 80 % of pairs, where the angle alone does not say."
        )
        figure.supxlabel(note, fontsize=7.5, color=INK)
