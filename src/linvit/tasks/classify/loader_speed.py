"""Images per second of whole training steps by each loader, on JPEGs of ImageNet's size that are made for it.

    python -m linvit.tasks.classify.loader_speed --images 8192 --workers 14 -o benchmarks/loaders.json

A set of ImageNet's size has to be streamed, so what counts is the share of the resident loader's speed that is left
with a real model behind it. To see what bounds a loader, the step alone (one batch again and again) and each loader
alone are timed as well. The pictures are noise with a photograph's spectrum, which gives files of a photograph's size.
Before anything is timed, the pictures of both decoders have to agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.measurement.record import ResultFile, environment, package
from linvit.tasks.classify.batches import Batches
from linvit.tasks.classify.data import open_images
from linvit.tasks.classify.decoding import decodes_jpegs
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Resident, decode
from linvit.tasks.classify.streaming import Streamed

CLASSES = 10
DEIT = Augmentation(randaugment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0)
APART = 6.0  # grey levels by which decoders may differ on the mean
WARM, WINDOW = 6, 8  # steps before the first window, and of each


def make_jpegs(folder: Path, images: int, size: tuple[int, int] = (500, 375)) -> None:
    """Pictures in class folders: noise in octaves, each weaker than the one before, in files of 40 to 110 kB."""

    def one(index: int) -> None:
        draw = np.random.default_rng(index)
        picture = np.zeros((size[1], size[0], 3))
        for octave in range(2, 9):
            coarse = draw.integers(0, 256, (2**octave * 3 // 4, 2**octave, 3), dtype=np.uint8)
            layer = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            picture += (np.asarray(layer) - 127.5) * 0.7 ** (octave - 2)
        path = folder / "train" / f"class{index % CLASSES}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((picture + 127.5).clip(0, 255).astype(np.uint8)).save(path, quality=88)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, range(images)))


def measure_loaders(
    folder: Path,
    output: Path,
    *,
    batch: int = 1024,
    workers: int = 14,
    windows: int = 5,
    model: str = "vit_tiny_patch16_224",
    device: str = "cpu",
    **args: Any,
) -> dict[str, Any]:
    """The result file's content: a row for the step alone and one for each loader. `args` go to the model."""
    place = torch.device(device)
    train = open_images(folder, "train")
    built = timm.create_model(model, num_classes=CLASSES, **args).to(place)
    chosen = Preprocessing.of(built, crop=1.0)

    def streamed(decoder: str, augmentation: Augmentation = DEIT) -> Batches:
        options: dict[str, Any] = {"augmentation": augmentation, "device": place, "compile": place.type == "cuda"}
        return Streamed(train, chosen, batch, CLASSES, workers=workers, decoder=decoder, **options)

    pixels = decode(train, chosen, device=place)
    resident = Resident(pixels, chosen, batch, CLASSES, augmentation=DEIT, compile=place.type == "cuda")
    loaders = {"resident": resident, "streamed, decoded on the CPU": streamed("cpu")}
    crops = replace(DEIT, randaugment=None, erasing=0.0, mixup=0.0, cutmix=0.0)
    apart = {
        "resident": grey_levels(Resident(pixels, chosen, batch, CLASSES, augmentation=crops), streamed("cpu", crops))
    }
    if decodes_jpegs(place):
        loaders["streamed, decoded on the GPU"] = streamed("gpu")
        apart["decoded on the GPU"] = grey_levels(streamed("gpu", crops), streamed("cpu", crops))
        if not apart["decoded on the GPU"] <= APART:
            raise LinvitError(f"the two decoders differ by {apart['decoded on the GPU']:.1f} grey levels")
    step = make_step(built, place)
    sizes = [path.stat().st_size for path in folder.rglob("*.jpg")]
    head = {"kind": "bench loaders", "version": 1, "model": model, "args": args, "images": len(train), "batch": batch}
    head |= {
        "workers": workers,
        "torchvision": package("torchvision"),
        "file_bytes": int(statistics.median(sizes)),
        "grey_levels_from_cpu": apart,
    }
    file = ResultFile(output, head, environment(place, ["python", "-m", __spec__.name, *sys.argv[1:]]))
    fixed = next(resident.epoch(0))
    file.add({"loader": "none: the step alone", **speed(repeat(fixed), step, windows, place)})
    for name, source in loaders.items():
        alone = speed(endless(source), lambda *_: None, windows, place)
        whole = speed(endless(source), step, windows, place)
        file.add({"loader": name, **whole, "without_a_model": alone["images_per_second"]})
    rows = {row["loader"]: row for row in file.rows}
    for row in file.rows:
        row["of_resident"] = row["images_per_second"] / rows["resident"]["images_per_second"]
    return file.finish()


def make_step(model: torch.nn.Module, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """A plain training step in bfloat16."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    forward = torch.compile(model) if device.type == "cuda" else model

    def step(images: Tensor, targets: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(images), targets)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def endless(source: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in count():
        yield from source.epoch(epoch)


def speed(
    batches: Iterable[tuple[Tensor, Tensor]], step: Callable[..., None], windows: int, device: torch.device
) -> dict[str, Any]:
    """Images per second: the median of some windows of steps, and the slowest and fastest."""
    found: list[float] = []
    images, begin = 0, 0.0
    for number, (pixels, targets) in enumerate(islice(batches, WARM + WINDOW * windows), start=1):
        step(pixels, targets)
        images += len(pixels)
        if number >= WARM and (number - WARM) % WINDOW == 0:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            found.extend([images / (now - begin)] if number > WARM else [])
            images, begin = 0, now
    return {"images_per_second": statistics.median(found), "slowest": min(found), "fastest": max(found)}


def grey_levels(source: Batches, other: Batches) -> float:
    """How far the first batches of two loaders are apart, on the mean."""
    ours, theirs = (next(one.epoch(0))[0] for one in (source, other))
    return float(((ours - theirs).abs() * source.std.view(1, -1, 1, 1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--folder", type=Path, default=Path("jpegs"), help="Where the JPEGs are, or are made.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    if not given.folder.exists():
        make_jpegs(given.folder, given.images)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = measure_loaders(given.folder, given.output, batch=given.batch, workers=given.workers, device=device)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
