"""Small real comparisons: a pyramid of 16 tokens that learns the digits for a few steps."""

from __future__ import annotations

from typing import Any

from linvit.comparison.description.job import Job
from linvit.comparison.description.request import survey
from linvit.comparison.description.spec import Comparison

PLAIN = (
    "warmup_epochs=0", "lr=3e-3", "lr_batch=none", "batch_size=256", "precision=fp32", "ema=none", "drop_path=0",
    "mixup=0", "cutmix=0", "erasing=0", "randaugment=none", "colour_jitter=0", "flip=0", "crop_scale=0.6,1",
)  # fmt: skip
FAIR: dict[str, Any] = {"model": "fair", "width": 16, "depths": [1, 1], "heads": [1, 2]}


def expand(comparison: Comparison) -> list[Job]:
    """All its jobs."""
    return survey(comparison)[0]


def jobs(*candidates: str, settings: tuple[str, ...] = (), plain: bool = True, **changes: Any) -> list[Job]:
    """The jobs of a comparison; without a ladder of sizes there are no speeds among them."""
    given = {
        "plans": list(candidates),
        "settings": [*(PLAIN if plain else ()), "epochs=2", *settings],
        "patch_size": [8],
        "size": [32],
        "architecture": FAIR,
        "measure": {"size": []},
        **changes,
    }
    return expand(Comparison.from_dict(given))
