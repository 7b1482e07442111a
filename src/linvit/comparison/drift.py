"""How far a trained model's answers move when all of it runs in half precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from linvit.measurement.speed import relative_rms
from linvit.training.contract import BatchSource
from linvit.training.objectives.supervised import logits_of

KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
IMAGES = 512


@torch.no_grad()
def measure_drift(model: nn.Module, source: BatchSource, images: int = IMAGES) -> list[dict[str, Any]]:
    """For each kind of half precision: the relative RMS of the logits against float32, how often the same class is
    chosen (in percent), and whether all is finite. Weights and images are rounded, no autocast helps."""
    batches: list[Tensor] = []
    for batch, _ in source.epoch(0):
        batches.append(batch[: images - sum(map(len, batches))])
        if sum(map(len, batches)) >= images:
            break
    truth = answers(copy.deepcopy(model).float(), batches, torch.float32)
    return [compare(model, batches, truth, name) for name in KINDS]


def compare(model: nn.Module, batches: list[Tensor], truth: Tensor, name: str) -> dict[str, Any]:
    try:
        found = answers(copy.deepcopy(model).to(KINDS[name]), batches, KINDS[name])
    except (RuntimeError, NotImplementedError) as error:  # an operation that this device has in float32 only
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return {"dtype": name, "relative_rms": None, "agreement": None, "finite": None, "note": reason}
    finite = bool(found.isfinite().all())
    agreement = 100 * float((found.argmax(-1) == truth.argmax(-1)).double().mean())
    rms = relative_rms(found, truth) if finite else None
    return {"dtype": name, "relative_rms": rms, "agreement": agreement if finite else None, "finite": finite}


def answers(model: nn.Module, batches: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The logits of all batches, in float64."""
    model.eval()
    return torch.cat([logits_of(model(batch.to(dtype))).double() for batch in batches])
