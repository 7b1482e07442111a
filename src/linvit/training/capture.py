"""A step as one CUDA graph: small models train as fast as the device can, not as fast as Python can tell it what to do.

The first steps of each kind run as they are and warm everything up. Then the same work is recorded, which computes
nothing, and from there on each step copies its batch into the recorded one's place and is started by a single call.
Seeds stay the step's own: the generator's state is read when the graph starts. So a step has the same bits recorded or
not, and a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from linvit.training.config import Config

WARM = 3  # steps of a kind before it is recorded
Work = Callable[[Tensor, Tensor], None]


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    images: Tensor
    targets: Tensor


def captures(config: Config, accelerator: Accelerator) -> bool:
    """Whether steps can be recorded: on one CUDA device, in one part, without a loss scale that asks the host, and
    where the compiler does not record graphs of its own."""
    return (
        config.cuda_graph
        and accelerator.device.type == "cuda"
        and accelerator.num_processes == 1
        and config.accumulate == 1
        and accelerator.scaler is None
        and config.optimiser != "sgd"
        and config.compile in ("auto", "off", "blocks", "default")
    )


class Capture:
    """Runs a stage's steps, recorded where that is possible. `kind` tells steps apart that do different work."""

    def __init__(self, wanted: bool, note: Callable[[str], None]) -> None:
        self.wanted, self.note = wanted, note
        self.recordings: dict[Hashable, Recording] = {}
        self.warm: dict[Hashable, int] = {}

    def __call__(self, work: Work, clear: Callable[[], None], kind: Hashable, images: Tensor, targets: Tensor) -> None:
        """One step. `clear` forgets the gradients of the step before; a recorded step overwrites its own."""
        key = (kind, images.shape, images.dtype, targets.shape, targets.dtype)
        if self.wanted and key not in self.recordings and self.warm.get(key, 0) >= WARM:
            clear()
            self.record(work, key, images, targets)
        if key in self.recordings:
            made = self.recordings[key]
            made.images.copy_(images)
            made.targets.copy_(targets)
            made.graph.replay()
            return
        clear()
        work(images, targets)
        self.warm[key] = self.warm.get(key, 0) + 1

    def record(self, work: Work, key: Hashable, images: Tensor, targets: Tensor) -> None:
        """Record the work; where something in it cannot be, say so and go on without."""
        made = Recording(torch.cuda.CUDAGraph(), images.clone(), targets.clone())
        try:
            with recording(made.graph):
                work(made.images, made.targets)
        except RuntimeError as error:
            self.wanted = False
            self.note(f"the step cannot be recorded as a CUDA graph and runs without: {str(error).splitlines()[0]}")
            return
        self.recordings[key] = made


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Work inside is recorded. Where it fails, the generator would be left as if a recording were still under way and
    refuse to draw, so it gets the state it had."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        generator.graphsafe_set_state(before)
        raise


class Replayed:
    """A function of tensors that draws nothing and keeps nothing, recorded for each set of shapes. Results are the
    caller's own."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.warm: dict[Hashable, int] = {}
        self.recordings: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]] = {}

    @torch.no_grad()
    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        key = tuple((tensor.shape, tensor.dtype) for tensor in given)
        if key not in self.recordings:
            self.warm[key] = self.warm.get(key, 0) + 1
            if self.warm[key] <= WARM:
                return self.function(*given)
            graph, places = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in given]
            try:
                with recording(graph):
                    results = self.function(*places)
            except RuntimeError:  # something in it asks the host
                self.warm[key] = -(2**62)
                return self.function(*given)
            self.recordings[key] = (graph, places, results)
        graph, places, results = self.recordings[key]
        for place, tensor in zip(places, given, strict=True):
            place.copy_(tensor)
        graph.replay()
        return tuple(result.clone() for result in results)
