"""The papers' theory, measured: Monte Carlo with 95 % intervals against the closed forms.

MixA's theorems 5.1 to 5.3 and what they mean for the scale of SteLLA's output, Castling's angular series, QT-ViT's
Kronecker identity and its compact approximation. SteLLA's, Castling's and QT's numbers come from the mechanisms
themselves. The 95 % hold for all intervals together (Bonferroni), so one row outside is news and not one in twenty.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import log, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linvit.attention import Rotary, Shape, TokenGrid, create_attention
from linvit.attention.qt import QuadraticTaylor
from linvit.errors import LinvitError
from linvit.measurement import closed_forms as closed

HEAD_DIMS = (16, 32, 64, 128)
TOKENS = (49, 196, 784)  # 7×7, 14×14 and 28×28 patches
ORDERS = (1, 3, 5, 7)
COSINES = (0.3, 0.6, 0.9)
DISTANCES = (1, 4, 16)  # of tokens in a row
CORRELATION = 0.5  # of the values of two tokens, where they are correlated
SAMPLES, FEWEST = 200_000, 10_000
CONFIDENCE = 0.95
ROUNDING = 1e-12
CHUNK = 1 << 24  # numbers drawn at a time


class Topic(NamedTuple):
    title: str
    meaning: str


TOPICS = {
    "5.1": Topic(
        "MixA, theorem 5.1: the product of a query and a key",
        "Scores have a standard deviation of √d: hence the 1/√d of softmax and ReLU-quadratic attention.",
    ),
    "5.2": Topic(
        "MixA, theorem 5.2: the sum over N tokens, d = 64",
        "O(N²) is reached when tokens share values, as neighbouring patches do; then 1/N keeps the scale. "
        "With independent values the sum grows with N alone, and 1/N shrinks the output by √N.",
    ),
    "5.3": Topic(
        "MixA, theorem 5.3: the product of ReLU features",
        "O(d) stands, so 1/√d fits; the printed constant d(1/4 − 1/2π) does not, it is d(1/4 − 1/4π²). "
        "The mean d/2π is not in the paper.",
    ),
    "scale": Topic(
        "What this makes of SteLLA's output (its formula is inferred)",
        "Rows of the map sum to √d/2π, near softmax's 1 for heads of 32 to 64: the scale pretrained weights expect. "
        "Values are half correlated here; softmax and ReLU-linear are measured beside it.",
    ),
    "angular": Topic(
        "Castling: the angular kernel 1 − θ/π and its linear part ½ + x/π",
        "Random queries and keys are nearly orthogonal, and there the linear part is nearly all of it; "
        "the residual counts for aligned pairs.",
    ),
    "taylor": Topic(
        "QT: the second-order kernel 1 + x + x²/2, x = q·k/√d",
        "The Kronecker identity is exact. The compact form has the same mean but keeps about 4/3d of the variance: "
        "at d = 64 it tells keys apart far less than the kernel it stands for.",
    ),
    "rotary": Topic(
        "Rotary position on ReLU features, d = 64",
        "Moving a query and its key together changes nothing. Positive features have a mean product, which turning "
        "weakens with distance: what is a mere phase in q·k also favours the neighbourhood here.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One measured number, its 95 % interval, and the number a formula gives (None where there is no formula)."""

    topic: str
    quantity: str
    measured: float
    error: float  # standard error; 0 for an identity, which holds to rounding
    expected: float | None
    d: int | None = None
    tokens: int | None = None
    wrong: bool = False  # `expected` is a printed formula known to be wrong
    width: float = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # half the interval, in standard errors

    @property
    def low(self) -> float:
        return self.measured - self.width * self.error

    @property
    def high(self) -> float:
        return self.measured + self.width * self.error

    @property
    def inside(self) -> bool | None:
        if self.expected is None:
            return None
        return self.low - ROUNDING <= self.expected <= self.high + ROUNDING

    @property
    def deviation(self) -> float | None:
        """Distance from the formula in standard errors."""
        if self.expected is None or not self.error:
            return None
        return abs(self.measured - self.expected) / self.error

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {name: getattr(self, name) for name in ("low", "high", "inside", "deviation")}


class Sampler:
    """Draws and estimates; one seed, one stream."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=dtype)

    def collect(self, draw: Callable[[int], Tensor], numbers: int, samples: int | None = None) -> Tensor:
        """`draw(n)` for all samples in chunks; `numbers` is how many random numbers one sample takes."""
        whole, chunk = samples or self.samples, max(1, CHUNK // numbers)
        return torch.cat([draw(min(chunk, whole - done)).double() for done in range(0, whole, chunk)])

    def pairs(self, d: int, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return self.collect(lambda n: of(self.normal(n, d), self.normal(n, d)), 2 * d)


def mean(x: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(x.mean()), float(x.std()) / sqrt(len(x))


def variance(x: Tensor) -> tuple[float, float]:
    """Variance and its standard error, from the fourth moment."""
    value = float(x.var())
    fourth = float((x - x.mean()).pow(4).mean())
    return value, sqrt(max(fourth - value**2, 0.0) / len(x))


def root(value: float, error: float) -> tuple[float, float]:
    """The square root, its error to first order."""
    return sqrt(value), error / (2 * sqrt(value))


def products(sampler: Sampler) -> Iterator[Finding]:
    """Theorem 5.1: Var(q·k) = d."""
    for d in HEAD_DIMS:
        x = sampler.pairs(d, lambda q, k: (q * k).sum(-1))
        yield Finding("5.1", "Var(q·k)", *variance(x), float(d), d)


def sums(sampler: Sampler, d: int = 64) -> Iterator[Finding]:
    """Sums over tokens, from SteLLA's own output with its constant 1/(N√d) taken off."""
    for name, correlation, power in (("iid", 0.0, 1), ("correlated", CORRELATION, 2)):
        found = {tokens: output_variance(sampler, "stella", d, tokens, correlation) for tokens in TOKENS}
        for tokens, (value, error) in found.items():
            scale = tokens ** (2 - power) * d
            expected = closed.sum_variance(d, tokens, correlation) / tokens**power
            label = f"Var(Σ A·v)/{'N²' if power == 2 else 'N'}, {name} v"
            yield Finding("5.2", label, value * scale, error * scale, expected, d, tokens)
        few, many = TOKENS[0], TOKENS[-1]
        span = log(many / few)
        value = 2 + log(found[many][0] / found[few][0]) / span
        error = sqrt(sum((found[n][1] / found[n][0]) ** 2 for n in (few, many))) / span
        ratio = closed.sum_variance(d, many, correlation) / closed.sum_variance(d, few, correlation)
        yield Finding("5.2", f"p of Var ∝ N^p, {name} v", value, error, log(ratio) / span, d)


def output_variance(sampler: Sampler, name: str, d: int, tokens: int, correlation: float) -> tuple[float, float]:
    """Mean square of a mechanism's output for values of unit variance and mean zero. One sample is a whole batch item:
    its queries and channels are averaged first, as they are not independent."""
    mechanism = create_attention(name)
    queries = 16

    def draw(n: int) -> Tensor:
        q, k, own = sampler.normal(n, 1, queries, d), sampler.normal(n, 1, tokens, d), sampler.normal(n, 1, tokens, d)
        v = sqrt(correlation) * sampler.normal(n, 1, 1, d) + sqrt(1 - correlation) * own
        return mechanism(q, k, v).square().mean((1, 2, 3))

    return mean(sampler.collect(draw, 2 * tokens * d, max(sampler.samples // 200, 50)))


def relu_products(sampler: Sampler) -> Iterator[Finding]:
    """ReLU products, read off SteLLA's map of a single token."""
    stella = create_attention("stella")
    for d in HEAD_DIMS:
        x = sampler.pairs(d, lambda q, k: stella.map(q[:, None, None], k[:, None, None]).flatten()) * sqrt(d)
        yield Finding("5.3", "mean", *mean(x), closed.relu_product_mean(d), d)
        yield Finding("5.3", "variance", *variance(x), closed.relu_product_variance(d), d)
        printed = closed.relu_product_variance_as_printed(d)
        yield Finding("5.3", "variance as printed (wrong)", *variance(x), printed, d, wrong=True)


def scale(sampler: Sampler, tokens: int = 196) -> Iterator[Finding]:
    for d in HEAD_DIMS:
        yield Finding("scale", "row sum of stella", *row_sum(sampler, "stella", d), closed.stella_row_sum(d), d, tokens)
    expected: float | None = closed.relu_quadratic_row_sum(64)
    yield Finding("scale", "row sum of relu_quadratic", *row_sum(sampler, "relu_quadratic"), expected, 64, tokens)
    for name in ("stella", "relu_quadratic", "relu_linear", "softmax"):
        value = root(*output_variance(sampler, name, 64, tokens, CORRELATION))
        expected = closed.stella_output_std(64, tokens, CORRELATION) if name == "stella" else None
        yield Finding("scale", f"output std of {name}", *value, expected, 64, tokens)


def row_sum(sampler: Sampler, name: str, d: int = 64, tokens: int = 196) -> tuple[float, float]:
    """Mean row sum of a mechanism's map, one query a sample."""
    mechanism = create_attention(name)

    def draw(n: int) -> Tensor:
        return mechanism.map(sampler.normal(n, 1, 1, d), sampler.normal(n, 1, tokens, d)).sum((1, 2, 3))

    return mean(sampler.collect(draw, tokens * d, max(sampler.samples // 100, 100)))


def angular(sampler: Sampler) -> Iterator[Finding]:
    """The kernel is the chance that a random hyperplane leaves two vectors on one side; its series' residual."""
    for cosine in COSINES:
        expected = closed.angular(np.array([cosine])).item()
        yield Finding("angular", f"kernel at x = {cosine}", *same_side(sampler, cosine), expected)
    at = np.array([COSINES[-1]])
    value, error = same_side(sampler, COSINES[-1])
    for order in ORDERS:
        series = closed.angular_series(at, order).item()
        expected = closed.angular(at).item() - series
        yield Finding("angular", f"residual at x = {COSINES[-1]}, order {order}", value - series, error, expected)
    whole, linear = create_attention("angular", variant="output_norm"), create_attention("castling", kernel_size=None)
    for d in HEAD_DIMS[:3]:

        def residual(q: Tensor, k: Tensor) -> Tensor:
            q, k = q[:, None, None], k[:, None, None]
            return (whole.map(q, k) - linear.map(q, k)).flatten()

        squares = sampler.pairs(d, residual).square()
        expected = closed.angular_residual_rms(d)
        yield Finding("angular", "residual of the linear part, rms", *root(*mean(squares)), expected, d)


def same_side(sampler: Sampler, cosine: float) -> tuple[float, float]:
    w = sampler.normal(sampler.samples, 2).double()
    return mean((w[:, 0] * (w[:, 0] * cosine + w[:, 1] * sqrt(1 - cosine**2)) > 0).double())


def taylor(sampler: Sampler) -> Iterator[Finding]:
    for d in (16, 64):
        exact = QuadraticTaylor(Shape(head_dim=d), variant="exact")
        q, k = sampler.normal(500, d, dtype=torch.float64), sampler.normal(500, d, dtype=torch.float64)
        polynomial = taylor_polynomial((q * k).sum(-1) / sqrt(d))
        worst = ((exact.expand(q) * exact.expand(k)).sum(-1) / polynomial - 1).abs().max()
        yield Finding("taylor", "Kronecker identity, worst gap", float(worst), 0.0, 0.0, d)

        x, compact = taylor_pairs(sampler, d)
        full = taylor_polynomial(x)
        yield Finding("taylor", "mean of exp(x)", *mean(x.exp()), closed.softmax_kernel_mean(d), d)
        yield Finding("taylor", "mean, exact", *mean(full), closed.TAYLOR_MEAN, d)
        yield Finding("taylor", "mean, compact", *mean(compact), closed.TAYLOR_MEAN, d)
        yield Finding("taylor", "variance, exact", *variance(full), closed.taylor_variance(d), d)
        yield Finding("taylor", "variance, compact", *variance(compact), closed.compact_variance(d), d)
        yield Finding("taylor", "mean of (exact − compact)²", *mean((full - compact) ** 2), closed.compact_error(d), d)


def taylor_pairs(sampler: Sampler, d: int) -> tuple[Tensor, Tensor]:
    """x = q·k/√d and, for the same pairs, what QT's compact features make of it (½ as in the exact form)."""
    mechanism = QuadraticTaylor(Shape(head_dim=d), variant="compact").requires_grad_(False)

    def both(q: Tensor, k: Tensor) -> Tensor:
        compact = (mechanism.expand(q) * mechanism.expand(k)).sum(-1) / 2
        return torch.stack(((q * k).sum(-1) / sqrt(d), compact), -1)

    x, compact = sampler.pairs(d, both).unbind(-1)
    return x, compact


def taylor_polynomial(x: Tensor) -> Tensor:
    return 1 + x + x**2 / 2


def rotary(sampler: Sampler, d: int = 64) -> Iterator[Finding]:
    """Read off SteLLA's map of a query and a key on one line of patches."""
    stella, turn = create_attention("stella"), Rotary.axial(TokenGrid.line(DISTANCES[-1] + 4), d, dtype=torch.float64)

    def weight(q: Tensor, k: Tensor, at: int, apart: int) -> Tensor:
        places = [at, at + apart]
        two = Rotary(turn.cos[places], turn.sin[places], turn.blocks)
        both = torch.stack((q, k), 1)[:, None]
        return stella.map(both, both, rotary=two)[:, 0, 0, 1] * 2 * sqrt(d)

    q, k = (sampler.normal(500, d, dtype=torch.float64) for _ in range(2))
    moved = [weight(q, k, at, DISTANCES[1]) for at in (0, 3)]
    gap = float((moved[0] - moved[1]).abs().max() / moved[0].abs().max())
    yield Finding("rotary", "moved together, worst gap", gap, 0.0, 0.0, d)
    for apart in DISTANCES:
        x = sampler.pairs(d, lambda q, k, apart=apart: weight(q, k, 0, apart))  # type: ignore[misc]
        x = x / closed.relu_product_mean(d)
        yield Finding("rotary", f"weight {apart} apart, over touching", *mean(x), closed.rotary_mean(d, apart), d)


PARTS = (products, sums, relu_products, scale, angular, taylor, rotary)


def measure(samples: int = SAMPLES, seed: int = 0, advance: Callable[[], None] = lambda: None) -> list[Finding]:
    """Everything, with intervals that hold together. `advance` is called after each of the PARTS."""
    if samples < FEWEST:
        raise LinvitError(f"{samples} samples are too few for the intervals to mean anything; take at least {FEWEST}")
    sampler = Sampler(samples, seed)
    found: list[Finding] = []
    for part in PARTS:
        found += part(sampler)
        advance()
    compared = sum(f.deviation is not None for f in found)
    width = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (2 * compared))
    return [replace(f, width=width) for f in found]
