"""Real photographs for the tests: scikit-learn's two, and the archive of Imagenette where there is one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

ARCHIVE = Path(__file__).parents[4] / "shared" / "data" / "imagenette128.tar"


@cache
def photographs(size: int = 32, count: int = 8) -> tuple[Image.Image, ...]:
    """Square cuts from a temple and a flower."""
    cuts = []
    for i in range(count):
        pixels = load_sample_images().images[i % 2]
        top, left = 40 * (i // 2), 70 * (i // 2)
        cut = Image.fromarray(pixels[top : top + 240, left : left + 240])
        cuts.append(cut.resize((size, size), Image.Resampling.BILINEAR))
    return tuple(cuts)


def stack(pictures: tuple[Image.Image, ...]) -> Tensor:
    """A batch with values from 0 to 255."""
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() for picture in pictures])


def archive() -> Path:
    if not ARCHIVE.exists():
        pytest.skip(f"needs {ARCHIVE.name}, an archive of photographs that is not part of the repository")
    return ARCHIVE
