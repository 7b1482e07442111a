"""Compiled block by block: a transformer repeats one block, so compiling that one serves them all.

It takes seconds where a whole step takes a minute, and is nearly as fast, since what there is to fuse lies inside the
blocks. Alignment calls the attention layers on their own and listens inside the blocks, so there the layers are what is
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from linvit.conversion.convert import find_hosts
from linvit.training.alignment import AttentionAlignment, blocks_around_hosts
from linvit.training.contract import Objective

ROOM = 64  # forms of one block that the compiler may keep: stages of a pyramid, teacher and student


def parts_of(objective: Objective, model: nn.Module) -> list[nn.Module]:
    """What repeats in a step of this objective: in the model, in the teacher if there is one, and the distance between
    what comes out of the two."""
    teacher = getattr(getattr(objective, "teacher", None), "model", None)
    found: list[nn.Module] = []
    for each in (model, teacher):
        if each is None:
            continue
        layers = isinstance(objective, AttentionAlignment)
        names = [name for name, _ in find_hosts(each)] if layers else blocks_around_hosts(each)
        found += [each.get_submodule(name) for name in names]
    distance = getattr(objective, "distance", None)
    return [*found, distance] if found and distance is not None else found


class Blocks:
    """Modules with a compiled forward, which is theirs inside `at_work` only: what else calls them, an evaluation say,
    has other shapes and modes and is not worth compiling."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.forwards: list[tuple[nn.Module, Callable[..., Any]]] = [
            (module, torch.compile(module.forward, dynamic=False)) for module in modules
        ]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        own = [(module, vars(module).get("forward")) for module, _ in self.forwards]
        try:
            for module, forward in self.forwards:
                module.forward = forward
            with torch._dynamo.config.patch(recompile_limit=ROOM):
                yield
        finally:
            for module, before in own:
                if before is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = before
