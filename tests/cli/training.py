"""What the tests of training from the command line share: a tiny model, short settings and folders of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.cli.conftest import Outcome

SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
MODEL = ["vit_tiny_patch16_224", "--no-pretrained", *(f"--model-arg={key}={value}" for key, value in SHAPE.items())]
QUICK = ["--device=cpu", "--set=precision=fp32", "--set=batch_size=128", "--set=epochs=1"]
DEIT = ["--recipe=deit", "--set=randaugment=none", *QUICK]
Linvit = Callable[..., Outcome]
SMALL = ["--recipe=deit", "--device=cpu", "--set=precision=fp32", "--set=epochs=1", "--set=batch_size=4"]


def folder_of(path: Path, **classes: dict[str, int]) -> Path:
    """An image folder: for each split its classes and how many images they have."""
    draw = np.random.default_rng(0)
    for split, counts in classes.items():
        (path / split).mkdir(parents=True)
        for name, count in counts.items():
            (path / split / name).mkdir()
            for index in range(count):
                pixels = draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path / split / name / f"{index}.png")
    return path


def broken(path: Path) -> Path:
    folder_of(path, train={"a": 4, "b": 4}, val={"a": 2, "b": 2})
    (path / "train" / "a" / "1.png").write_text("no picture")
    return path
