"""The output projections of converted layers in closed form: most of an alignment, without a gradient step.

A layer ends in a linear map, `out = W·a + b`, of what its mechanism gives. On the teacher's inputs the W and b that
come closest to the original's output solve a least squares problem, and sums over some thousand images are all it
needs: one pass forward of the teacher and of each layer. A small ridge holds W near the pretrained one, where the
images say nothing. Run it before attention alignment, which then starts much further on.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linvit.training.alignment import Layers, hosts_to_align, like
from linvit.training.distillation import Teacher
from linvit.training.taps import Taps, main

RIDGE = 1e-3  # of the mean square of the mechanism's output


class Fit:
    """The sums of one layer's least squares problem, in float64."""

    def __init__(self, projection: nn.Linear) -> None:
        self.projection = projection
        width = projection.in_features + 1
        place: dict[str, Any] = {"dtype": torch.float64, "device": projection.weight.device}
        self.gram = torch.zeros(width, width, **place)
        self.cross = torch.zeros(width, projection.out_features, **place)
        self.given: Tensor | None = None
        self.gave: Tensor | None = None

    def see(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.given, self.gave = args[0], output

    def add(self, ours: Tensor, wanted: Tensor) -> None:
        """One batch: the layer's output and its original's. What the layer adds after its projection stays as it is."""
        assert self.given is not None and self.gave is not None
        rows = self.given.flatten(0, -2).double()
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        target = self.gave.double() + (wanted.double() - ours.double()).reshape(self.gave.shape)
        self.gram += rows.T @ rows
        self.cross += rows.T @ target.flatten(0, -2)

    def solve(self, ridge: float) -> None:
        weight, bias = self.projection.weight, self.projection.bias
        now = torch.cat([weight.T, bias[None] if bias is not None else torch.zeros_like(weight[:, :1]).T]).double()
        hold = ridge * self.gram.diagonal()[:-1].mean() * torch.ones_like(self.gram[0])
        hold[-1] = 1e-9 if bias is not None else 1e9 * self.gram[-1, -1]
        solved = torch.linalg.solve(self.gram + hold.diag(), self.cross + hold[:, None] * now)
        weight.copy_(solved[:-1].T)
        if bias is not None:
            bias.copy_(solved[-1])


def fit_projections(
    teacher: Teacher,
    student: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    images: int = 2048,
    ridge: float = RIDGE,
) -> list[str]:
    """Fit the output projections of the student's converted layers on up to so many images. Gives the names of the
    layers that have one; layers that end otherwise (LeViT's in a BatchNorm, say) are left as they are."""
    names = [name for name in hosts_to_align(teacher.model, student) if projection_of(student, name) is not None]
    fits = {name: Fit(found) for name in names if (found := projection_of(student, name)) is not None}
    layers, taps = Layers(student, names), Taps(teacher.model, names)
    handles = [fit.projection.register_forward_hook(partial(Fit.see, fit)) for fit in fits.values()]
    modes = {module: module.training for module in student.modules()}
    student.eval()
    seen = 0
    try:
        with torch.no_grad():
            for batch, _ in batches:
                layers.ready(batch)
                taps.listen()
                teacher(batch)
                calls, wanted = taps.take()
                for name, fit in fits.items():
                    given, named = calls[name]
                    dtype = fit.projection.weight.dtype  # the teacher may compute in half precision
                    ours = layers.call(name, (like(given, dtype), like(named, dtype)), batch)
                    fit.add(ours, main(wanted[name]))
                seen += len(batch)
                if seen >= images:
                    break
            for fit in fits.values() if seen else ():
                fit.solve(ridge)
    finally:
        for handle in handles:
            handle.remove()
        taps.close()
        for module, training in modes.items():
            module.training = training
    return names


def projection_of(model: nn.Module, name: str) -> nn.Linear | None:
    """The linear layer an attention layer ends in, by the name timm gives it."""
    found = getattr(model.get_submodule(name), "proj", None)
    return found if type(found) is nn.Linear else None
