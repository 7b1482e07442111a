"""The plan `auto`: the fastest one that converts no layer where it would lose, measured where the model lies."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from linvit.conversion.planning.front import Study, study
from linvit.conversion.planning.timing import Setting


def choose_auto(
    model: nn.Module,
    size: tuple[int, int],
    *,
    candidates: Sequence[str],
    drop: Iterable[str] = (),
    device: torch.device | None = None,
) -> Study:
    """Times of every layer with every candidate, and of the whole model with the fastest plan beside its original.

    The front of the study has that plan last; where the whole model does not gain from it although its layers do, the
    layers that gain least go first, and in the end the model stays as it is.
    """
    return study(model, Setting.usual(model, size, device), candidates=candidates, drop=drop, points=3)
