"""A photograph through DeiT-tiny with softmax, and through the same model converted, at growing resolution.

The weights are random, as pretrained ones would have to be downloaded: so times are compared here, never labels.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.cli.output import console, table
from linvit.clock import Timing
from linvit.errors import LinvitError
from linvit.files import write_json
from linvit.measurement.record import cpu, environment
from linvit.measurement.speed import relative_rms
from scripts.demo.screen import Screen

MODEL = "deit_tiny_patch16_224"
PLANS = ("mixa", "stella")
SIZES = {224: 5, 448: 6, 1024: 25}  # sides, and about how many seconds each takes
ROUNDS, SECONDS = 4, 5.0  # at least so many, and more until so many seconds are up
TOLERANCE = 1e-4  # of float32 features against float64


@dataclass(frozen=True)
class Row:
    """One model at one size."""

    model: str
    size: int
    tokens: int
    time: Timing
    ratio: float  # softmax's median over this one's


def measure(screen: Screen) -> list[Row]:
    """The ladder. Every model is first held against itself in float64, at the smallest size."""
    screen.at("photograph", 0.0, "preparing the photograph")
    torch.set_num_threads(1)  # threads that wait for one another measure whatever else the machine does
    models, picture = build(screen), load_sample_image("china.jpg")
    check(models, prepare(picture, min(SIZES)))
    rows: list[Row] = []
    for size, seconds in SIZES.items():
        before = sum(spent for other, spent in SIZES.items() if other < size)

        def tick(share: float, size: int = size, before: int = before, seconds: int = seconds) -> None:
            screen.at("photograph", (before + share * seconds) / sum(SIZES.values()), f"a photograph of {size} px")

        rows += at_size(models, prepare(picture, size), tick)
        gains = ", ".join(f"{row.model} {row.ratio:.2f}×" for row in rows[-len(PLANS) :])
        screen.say(f"  {size:>4} px       softmax {rows[-len(models)].time.median:,.0f} ms, {gains} as fast")
    return rows


def build(screen: Screen) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    models = {"softmax": timm.create_model(MODEL, dynamic_img_size=True, num_classes=0).eval()}
    for plan in PLANS:
        models[plan] = copy.deepcopy(models["softmax"])
        screen.say(f">>> linvit.convert(model, {plan!r})")
        screen.say(f"  {str(linvit.convert(models[plan], plan)).splitlines()[0]}")
    return models


def prepare(picture: np.ndarray, size: int) -> Tensor:
    """The middle square as a normalised batch of one."""
    side = min(picture.shape[:2])
    top, left = (picture.shape[0] - side) // 2, (picture.shape[1] - side) // 2
    square = torch.from_numpy(picture[top : top + side, left : left + side].copy()).permute(2, 0, 1)[None] / 255
    resized = F.interpolate(square, (size, size), mode="bicubic", antialias=True)
    mean, std = (
        torch.tensor(c)[:, None, None] for c in (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    )
    return (resized - mean) / std


@torch.inference_mode()
def check(models: Mapping[str, nn.Module], image: Tensor) -> None:
    """A wrong answer needs no stop-watch."""
    for name, model in models.items():
        error = relative_rms(model(image), copy.deepcopy(model).double()(image.double()))
        if not error < TOLERANCE:
            raise LinvitError(f"{name} is off by {error:.1e} in float32: it is not timed")


@torch.inference_mode()
def at_size(models: Mapping[str, nn.Module], image: Tensor, tick: Callable[[float], None]) -> list[Row]:
    """The models by turns, so that what happens to the machine meantime happens to all of them."""
    for model in models.values():
        model(image)
    samples: dict[str, list[float]] = {name: [] for name in models}
    began = time.perf_counter()
    while len(samples["softmax"]) < ROUNDS or time.perf_counter() < began + SECONDS:
        for name, model in models.items():
            calls = sum(len(found) for found in samples.values())
            tick(min(calls / (ROUNDS * len(models)), (time.perf_counter() - began) / SECONDS, 1.0))
            begin = time.perf_counter()
            model(image)
            samples[name].append((time.perf_counter() - begin) * 1e3)
    size = image.shape[-1]
    times = {name: Timing.of(found) for name, found in samples.items()}
    slow = times["softmax"].median
    return [Row(name, size, (size // 16) ** 2 + 1, found, slow / found.median) for name, found in times.items()]


def show(rows: Sequence[Row]) -> None:
    made = table(side=4, tokens=-6, attention=9, ms=-7, quartiles=15, speed=-6)
    for row in rows:
        first = row.model == "softmax"
        made.add_row(
            str(row.size) if first else "",
            f"{row.tokens:,}" if first else "",
            row.model,
            f"{row.time.median:,.0f}",
            f"{row.time.low:,.0f} … {row.time.high:,.0f}",
            f"{row.ratio:.2f}×",
        )
    out = console()
    out.print()
    out.rule("A photograph through DeiT-tiny", align="left")
    out.print(made)
    out.print(
        f"Batch 1, float32, eager, one thread of {cpu()}, torch {torch.__version__}; by turns, medians of at least "
        f"{ROUNDS} rounds. mixa keeps 6 of 12 layers quadratic, stella none. Above 427 pixels the photograph is "
        "enlarged. The weights are random: this is about time, not about accuracy.",
        style="italic",
    )


def record(rows: Sequence[Row], path: Path) -> None:
    found = {"kind": "photograph", "model": MODEL, "environment": environment("cpu")}
    write_json(path, {**found, "rows": [asdict(row) for row in rows]})


def draw(rows: Sequence[Row], path: Path) -> None:
    """The photograph, and time over its side."""
    figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    left.imshow(load_sample_image("china.jpg"))
    left.axis("off")
    for name, colour in zip(("softmax", *PLANS), ("#1f2933", "#c8503c", "#1f6fb4"), strict=True):
        chosen = [row for row in rows if row.model == name]
        right.plot([row.size for row in chosen], [row.time.median for row in chosen], "o-", color=colour, ms=4, lw=1.5)
        last = chosen[-1]
        text = f"{name} {last.time.median / 1e3:.1f} s" + (f", {last.ratio:.1f}×" if name != "softmax" else "")
        right.annotate(
            text, (last.size, last.time.median), xytext=(8, 0), textcoords="offset points", color=colour, va="center"
        )
    sizes = sorted({row.size for row in rows})
    right.set(xscale="log", yscale="log", xlabel="image side, pixels", xlim=(0.85 * sizes[0], 2.2 * sizes[-1]))
    right.set_title("milliseconds per image: DeiT-tiny, one CPU thread", fontsize=10, loc="left")
    right.set_xticks(sizes, [f"{size:,}" for size in sizes])
    right.yaxis.set_major_locator(LogLocator(10, subs=(1, 3)))
    right.yaxis.set_major_formatter("{x:,.0f}")
    right.minorticks_off()
    right.grid(axis="y", color="#d9dee3", lw=0.6)
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
