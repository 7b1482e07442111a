"""How far a trained model's answers move when all of it runs in half precision."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from linvit.comparison.results import Drift
from linvit.measurement.speed import relative_rms
from linvit.training.contract import BatchSource
from linvit.training.objectives.teacher import logits_of

KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
IMAGES = 512


@torch.no_grad()
def measure_drift(model: nn.Module, source: BatchSource, images: int = IMAGES) -> tuple[Drift, ...]:
    """For each kind of half precision: the relative RMS of the logits against float32, how often the same class is
    chosen (in percent), and whether all is finite. Weights and images are rounded, no autocast helps."""
    batches: list[Tensor] = []
    for batch, _ in source.epoch(0):
        batches.append(batch[: images - sum(map(len, batches))])
        if sum(map(len, batches)) >= images:
            break
    truth = answers(copy.deepcopy(model).float(), batches, torch.float32)
    return tuple(compare(model, batches, truth, name) for name in KINDS)


def compare(model: nn.Module, batches: list[Tensor], truth: Tensor, name: str) -> Drift:
    try:
        found = answers(copy.deepcopy(model).to(KINDS[name]), batches, KINDS[name])
    except (RuntimeError, NotImplementedError) as error:  # an operation that this device has in float32 only
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Drift(name, None, None, None, reason)
    if not bool(found.isfinite().all()):
        return Drift(name, None, None, False)
    agreement = 100 * float((found.argmax(-1) == truth.argmax(-1)).double().mean())
    return Drift(name, relative_rms(found, truth), agreement, True)


def answers(model: nn.Module, batches: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The logits of all batches, in float64."""
    model.eval()
    return torch.cat([logits_of(model(batch.to(dtype))).double() for batch in batches])
