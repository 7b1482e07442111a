"""`make demo`: the papers' tables, the theory plot, and a photograph through a converted model at three resolutions.

Everything lands in demo/. The model has random weights, as pretrained ones would have to be downloaded: so times and
features are compared here, never labels.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from rich.console import Console
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.cli.output import console, table
from linvit.measurement.clock import Timing
from linvit.measurement.record import cpu
from linvit.measurement.speed import relative_rms

FOLDER = Path(__file__).parent.parent / "demo"
MODEL = "deit_tiny_patch16_224"
PLANS = ("stella", "mixa")
SIZES = (224, 448, 896)
ROUNDS, SECONDS = 5, 3.0  # at least so many, and more until so many seconds are up


@dataclass(frozen=True)
class Row:
    """One model at one size: its time, and its features beside softmax's and beside its own in float64."""

    model: str
    size: int
    tokens: int
    time: Timing
    cosine: float
    error: float


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    out = console()
    for verb in (["tables"], ["theory", "--plot", str(FOLDER / "theory.png")]):
        out.rule(f"linvit {' '.join(verb[:1])}", align="left")
        text = run(verb)
        (FOLDER / f"{verb[0]}.txt").write_text(text, encoding="utf-8")
        print(text)
    out.rule("A photograph through a converted model", align="left")
    photograph(out)
    out.print(f"\nWritten to {FOLDER.name}/: {', '.join(sorted(path.name for path in FOLDER.iterdir()))}")


def run(verb: list[str]) -> str:
    """A verb's output; its errors and progress go where they always go."""
    done = subprocess.run([sys.executable, "-m", "linvit", *verb], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def photograph(out: Console) -> None:
    torch.set_num_threads(1)  # threads that wait for one another measure whatever else the machine does
    torch.manual_seed(0)
    softmax = timm.create_model(MODEL, dynamic_img_size=True, num_classes=0).eval()
    models = {"softmax": softmax}
    for plan in PLANS:
        models[plan] = copy.deepcopy(softmax)
        report = linvit.convert(models[plan], plan)
        out.print(str(report).splitlines()[0])
    picture = load_sample_image("china.jpg")
    rows = [row for size in SIZES for row in compare(models, prepare(picture, size))]
    made = table(size=4, model=8, tokens=-6, ms=-8, quartiles=13, faster=-6, cosine=-6, error=-7)
    slow = {row.size: row.time.median for row in rows if row.model == "softmax"}
    for row in rows:
        made.add_row(
            str(row.size),
            row.model,
            str(row.tokens),
            f"{row.time.median:.1f}",
            f"{row.time.low:.1f} … {row.time.high:.1f}",
            f"{slow[row.size] / row.time.median:.2f}×",
            f"{row.cosine:.3f}",
            f"{row.error:.1e}",
        )
    out.print(made)
    out.print(
        f"{MODEL}, batch 1, float32, eager, one thread, the models in turn, median of at least {ROUNDS} rounds; "
        f"{cpu()}, torch {torch.__version__}. "
        "Sizes above 427 are enlarged. “cosine” is between the features and softmax's: how far the swap alone turns "
        "them. The weights are random, so it says nothing about accuracy. “error” is against float64, relative.",
        style="italic",
    )
    draw(picture, rows, FOLDER / "photograph.png")


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
def compare(models: dict[str, nn.Module], image: Tensor) -> list[Row]:
    features = {name: model(image) for name, model in models.items()}
    samples: dict[str, list[float]] = {name: [] for name in models}
    until = time.perf_counter() + SECONDS
    while len(samples["softmax"]) < ROUNDS or time.perf_counter() < until:
        for name, model in models.items():
            begin = time.perf_counter()
            model(image)
            samples[name].append((time.perf_counter() - begin) * 1e3)
    size = image.shape[-1]
    return [
        Row(
            name,
            size,
            (size // 16) ** 2 + 1,
            Timing.of(samples[name]),
            F.cosine_similarity(features[name], features["softmax"]).item(),
            relative_rms(features[name], copy.deepcopy(model).double()(image.double())),
        )
        for name, model in models.items()
    ]


def draw(picture: np.ndarray, rows: list[Row], path: Path) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    left.imshow(picture)
    left.axis("off")
    for name, colour in zip(("softmax", *PLANS), ("#1f2933", "#1f6fb4", "#c8503c"), strict=True):
        chosen = [row for row in rows if row.model == name]
        x, y = [row.size for row in chosen], [row.time.median for row in chosen]
        right.plot(x, y, "o-", color=colour, ms=4, lw=1.3)
        right.annotate(name, (x[-1], y[-1]), xytext=(6, 0), textcoords="offset points", color=colour, va="center")
    right.set(xscale="log", yscale="log", xlim=(190, 1250), xlabel="image side")
    right.set_title("milliseconds per image, DeiT-T, one CPU thread", fontsize=10)
    right.set_xticks(SIZES, [str(size) for size in SIZES])
    right.set_yticks((30, 100, 300, 1000, 3000), ("30", "100", "300", "1,000", "3,000"))
    right.minorticks_off()
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
