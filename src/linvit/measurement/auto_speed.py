"""`bench auto`: what the plan `auto` converts of a model at an image size, and what that buys.

Weights are random, for times do not depend on them. Every layer is timed with every candidate by turns, then the whole
model with the chosen plan beside the original, as `linvit.convert(model, "auto")` does it. A model is never slower for
it: what does not pay stays. Where layers that linear attention should suit are left, the row says why.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
from torch import nn

from linvit import clock
from linvit.conversion.convert import find_hosts
from linvit.conversion.plan import AUTO, parse_plan
from linvit.conversion.planning import Setting, Study, study, the_choice
from linvit.errors import LinvitError, unknown
from linvit.measurement.model_speed import random_model
from linvit.measurement.speed import failure

KEY = ("model", "resolution")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row[name] for name in KEY)


def sweep(
    names: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    batch: int | None = None,
    candidates: Sequence[str] = AUTO,
    drop: Sequence[str] = (),
    done: Collection[tuple[Any, ...]] = (),
    budget: float = 0.2,
) -> Iterator[dict[str, Any]]:
    """A row for each model and size, as it is measured; a model that fails costs its own row only."""
    known = timm.list_models()
    for name in names:
        if name not in known:
            raise unknown("timm model", name, known)
    for text in candidates:
        the_choice(text)
    for name in names:
        for size in sizes:
            row: dict[str, Any] = {
                "model": name,
                "resolution": size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}",
            }
            if key(row) in done:
                continue
            try:
                model = random_model(name, size, {}).to(device).eval()
                setting = replace(Setting.usual(model, size, device), budget=budget)
                setting = replace(setting, batch=batch or setting.batch)
                row |= {"status": "ok", "batch": setting.batch, **told(measured(model, setting, candidates, drop))}
            except LinvitError as error:
                row |= {"status": "refused", "reason": str(error)}
            except Exception as error:  # such as a size the model cannot take
                row |= failure(error)
            clock.clean(device)
            yield row


def measured(model: nn.Module, setting: Setting, candidates: Sequence[str], drop: Sequence[str]) -> Study:
    if not find_hosts(model):
        raise LinvitError("no attention that linvit can swap")
    return study(model, setting, candidates=candidates, drop=tuple(drop), points=4)


def told(found: Study) -> dict[str, Any]:
    """What a row says of a study: its layers, the plan, MACs of all attention layers, and the measured speed."""
    best = found.choose()
    chosen = best.plan.choices([layer.cost.name for layer in found.layers])
    kept = [layer for layer, choice in zip(found.layers, chosen, strict=True) if choice is None]
    alone = ", ".join(str(layer.cost.index) for layer in kept if layer.large and layer.best is not None)
    after = 0
    for layer, choice in zip(found.layers, chosen, strict=True):
        macs = {str(parse_plan(option.candidate).default): option.macs for option in layer.options}
        after += macs.get(str(choice), layer.cost.macs)
    return {
        "layers": len(found.layers),
        "large": sum(layer.large for layer in found.layers),
        "plan": dict(Counter(str(choice) for choice in chosen if choice is not None)),
        "macs": sum(layer.cost.macs for layer in found.layers),
        "macs_converted": after,
        "ms": found.ms,
        "ratio": best.speedup,
        "missed": found.missed() + ([f"layers {alone}: faster alone, not by 1 % of the whole model"] if alone else []),
    }
