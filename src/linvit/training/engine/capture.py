"""A step as one CUDA graph: small models train as fast as the device can, not as fast as Python can tell it what to do.

The first steps of each kind run as they are and warm everything up. Then the same work is recorded, which computes
nothing, and from there on each step copies its batch into the recorded one's place and is started by a single call.
Seeds stay the step's own: the generator's state is read when the graph starts. So a step has the same bits recorded or
not, and a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as trees

from linvit.measurement.clock import recording
from linvit.training.config import Config
from linvit.training.contract import Batch
from linvit.training.processes import Processes

WARM = 3  # steps of a kind before it is recorded
Work = Callable[[Batch], None]
Recording = tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]  # with where its inputs and results lie


def captures(config: Config, processes: Processes) -> bool:
    """Whether steps can be recorded: on one CUDA device, in one part, without a loss scale that asks the host, and
    where the compiler does not record graphs of its own."""
    return (
        config.cuda_graph
        and processes.device.type == "cuda"
        and processes.world == 1
        and config.accumulate == 1
        and processes.scaler is None
        and config.optimiser != "sgd"
        and config.compile in ("auto", "off", "blocks", "default")
    )


class Capture:
    """Runs a stage's steps, recorded where that is possible."""

    def __init__(self, wanted: bool, note: Callable[[str], None]) -> None:
        self.wanted, self.note = wanted, note
        self.recordings: dict[Hashable, Recording] = {}
        self.warm: dict[Hashable, int] = {}

    def __call__(self, work: Work, clear: Callable[[], None], variant: Hashable, batch: Batch) -> None:
        """One step. `clear` forgets the gradients of the step before; a recorded step overwrites its own. Steps of
        another variant, or with a batch of other shapes, are other work."""
        leaves, structure = trees.tree_flatten(batch)
        key = (variant, structure, shapes_of(leaves))
        if self.wanted and key not in self.recordings and self.warm.get(key, 0) >= WARM:
            clear()
            try:
                self.recordings[key] = record(lambda *places: work(structure.unflatten(places)), leaves)
            except RuntimeError as error:
                self.wanted = False
                reason = str(error).splitlines()[0]
                self.note(f"the step cannot be recorded as a CUDA graph and runs without: {reason}")
        if key in self.recordings:
            replay(self.recordings[key], leaves)
            return
        clear()
        work(batch)
        self.warm[key] = self.warm.get(key, 0) + 1


def shapes_of(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def record(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Recording:
    """Record a function of tensors, which computes nothing; RuntimeError where something in it asks the host."""
    graph, places = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in tensors]
    with recording(graph):
        results = function(*places)
    return graph, places, results


def replay(made: Recording, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Do what was recorded with these tensors. The results lie where the next replay writes its own."""
    graph, places, results = made
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    graph.replay()
    return results


class Replayed:
    """A function of tensors that draws nothing and keeps nothing, recorded for each set of shapes. Results are the
    caller's own."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.warm: dict[Hashable, int] = {}
        self.recordings: dict[Hashable, Recording] = {}

    @torch.no_grad()
    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        key = shapes_of(given)
        if key not in self.recordings:
            self.warm[key] = self.warm.get(key, 0) + 1
            if self.warm[key] <= WARM:
                return self.function(*given)
            try:
                self.recordings[key] = record(self.function, given)
            except RuntimeError:  # something in it asks the host
                self.warm[key] = -(2**62)
                return self.function(*given)
        return tuple(result.clone() for result in replay(self.recordings[key], given))
