"""How steps run: compiled once for run after run, recorded as CUDA graphs, and with the same bits twice.

*Compiled block by block.* A transformer repeats one block, so compiling that one serves them all. It takes seconds
where a whole step takes a minute, and is nearly as fast, since what there is to fuse lies inside the blocks. Alignment
calls the attention layers on their own and hooks into the blocks, so there the layers are what is compiled.

*A step as one CUDA graph.* Small models train as fast as the device can, not as fast as Python can tell it what to do.
The first steps of each kind run as they are and warm everything up. Then the same work is recorded, which computes
nothing, and from there on each step copies its batch into the recorded one's place and is started by a single call.
Seeds stay the step's own: the generator's state is read when the graph starts. So a step has the same bits recorded or
not, and a resumed run equals an uninterrupted one.

*The same bits twice.* On a GPU, several backward passes add in whatever order their threads arrive, and the compiler
picks kernels by racing them. Both are switched off for the time of a run. Softmax attention is a case of its own: its
backward pass keeps an order only where PyTorch may fail and not just warn, and cuDNN's is left out of every run.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.utils import _pytree as trees

from linvit.clock import recording
from linvit.training.config import Config, Stage
from linvit.training.contract import Batch, Objective
from linvit.training.processes import Processes

LIMIT = 64  # forms of one block that the compiler may keep: stages of a pyramid, teacher and student
WARM = 3  # steps of a kind before it is recorded
Step = Callable[[Batch], dict[str, Tensor]]
Recording = tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]  # with where its inputs and results lie


@dataclass
class Phase:
    """A stage and what it minimises; `prepare`, where there is one, gets an epoch's batches before the first step.
    `compiled` is the step's compiled form: another run of the same model finds it here and compiles nothing."""

    stage: Stage
    objective: Objective
    prepare: Callable[[Iterator[Batch]], object] | None = None
    compiled: Step | None = None

    def step(self, objective: Objective, model: nn.Module, config: Config, device: torch.device) -> Step:
        """The step that minimises this objective. It is kept unless the objective is a run's own, as with MESA, which
        learns from that run's average."""
        if objective is not self.objective:
            return make_step(objective, model, config, device)
        if self.compiled is None:
            self.compiled = make_step(objective, model, config, device)
        return self.compiled


def compiles(config: Config, device: torch.device) -> bool:
    """Whether steps are compiled by this config on this device."""
    return config.compile != "off" and (config.compile != "auto" or device.type == "cuda")


def make_step(objective: Objective, model: nn.Module, config: Config, device: torch.device) -> Step:
    """An objective as one function of a batch, teacher and loss included, compiled where the config says so. It holds
    on to nothing else of a run."""

    def step(batch: Batch) -> dict[str, Tensor]:
        return objective(model, batch)

    if not compiles(config, device):
        return step
    by_blocks = config.compile in ("auto", "blocks")
    models = [model] if objective.teacher is None else [model, objective.teacher.model]
    modules = [module for each in models for module in objective.repeated(each)] if by_blocks else []
    modules += [objective.distance] if modules and objective.distance is not None else []
    if len(modules) < 2:
        return torch.compile(step, mode="default" if by_blocks else config.compile)
    forwards = [(module, torch.compile(module.forward, dynamic=False)) for module in modules]

    def step_by_blocks(batch: Batch) -> dict[str, Tensor]:
        with compiled_forwards(forwards):
            return objective(model, batch)

    return step_by_blocks


@contextmanager
def compiled_forwards(forwards: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Modules have a compiled forward inside only: what else calls them, an evaluation say, has other shapes and modes
    and is not worth compiling."""
    own = [(module, vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        with torch._dynamo.config.patch(recompile_limit=LIMIT):
            yield
    finally:
        for module, before in own:
            if before is None:
                vars(module).pop("forward", None)
            else:
                module.forward = before


def captures(config: Config, processes: Processes) -> bool:
    """Whether steps can be recorded: on one CUDA device, in one part, without a loss scale that asks the host, and
    where the compiler does not record graphs of its own."""
    one_device = processes.device.type == "cuda" and processes.world == 1
    in_one_go = config.accumulate == 1 and processes.scaler is None and config.optimiser != "sgd"
    return config.cuda_graph and one_device and in_one_go and config.compile in ("auto", "off", "blocks", "default")


class Capture:
    """Runs a stage's steps, recorded where that is possible."""

    def __init__(self, wanted: bool, note: Callable[[str], None]) -> None:
        self.wanted, self.note = wanted, note
        self.recordings: dict[Hashable, Recording] = {}
        self.warm: Counter[Hashable] = Counter()

    def __call__(
        self, work: Callable[[Batch], None], clear: Callable[[], None], variant: Hashable, batch: Batch
    ) -> None:
        """One step. `clear` forgets the gradients of the step before; a recorded step overwrites its own. Steps of
        another variant, or with a batch of other shapes, are other work."""
        leaves, structure = trees.tree_flatten(batch)
        key = (variant, structure, shapes_of(leaves))
        if self.wanted and key not in self.recordings and self.warm[key] >= WARM:
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
        self.warm[key] += 1


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
        self.warm: Counter[Hashable] = Counter()
        self.recordings: dict[Hashable, Recording] = {}

    @torch.no_grad()
    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        key = shapes_of(given)
        if key not in self.recordings:
            self.warm[key] += 1
            if self.warm[key] <= WARM:
                return self.function(*given)
            try:
                self.recordings[key] = record(self.function, given)
            except RuntimeError:  # something in it asks the host
                self.warm[key] = -(2**62)
                return self.function(*given)
        return tuple(result.clone() for result in replay(self.recordings[key], given))


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Softmax attention by PyTorch's other kernels inside.

    cuDNN's has no deterministic backward pass; and on Hopper, with 64 keys modulo 128, its gradients are NaN
    once a query's logits are all below −88 or so (pytorch/pytorch#196678).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms inside; where PyTorch has none for an operation, it warns."""
    if not wanted:
        yield
        return
    held = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # a guard for debugging, and slow
    try:
        with without_cudnn_attention(), inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(held[0], warn_only=held[1])
        settings.fill_uninitialized_memory = fill


@contextmanager
def strictly(wanted: bool) -> Iterator[None]:
    """Inside `repeatable`: operations without a deterministic algorithm fail, and attention takes the one it has."""
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted:
            torch.use_deterministic_algorithms(True, warn_only=True)
