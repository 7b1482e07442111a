"""A candidate's speed and memory over a ladder of image sizes, by turns with softmax in the same architecture.

Weights are random: speed does not ask for better ones. At every size there is the latency of one image and the time of
a batch, and at the size the candidate is trained at a training step. Memory is what a pass holds at its peak beyond the
weights and the images. What does not fit into memory, takes too long or is not finite is a row with a note. No other
comparison on the machine times meanwhile; rows that were timed beside a training say so.

On CUDA a pass is recorded as a CUDA graph and replayed: a small model would wait for Python otherwise, and all
mechanisms alike. Where one of the two cannot be recorded, both are timed as they are, and the row says so.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from linvit import clock
from linvit.codec import to_plain
from linvit.comparison.description.building import build_model
from linvit.comparison.results import (
    SOFTMAX,
    Candidate,
    Environment,
    Milliseconds,
    SpeedIdentity,
    SpeedPoint,
    Structure,
)
from linvit.comparison.scheduling.execution.machine import timing_on
from linvit.comparison.scheduling.execution.passes import Call, inference_pass, is_finite, training_pass
from linvit.conversion import find_hosts
from linvit.conversion.host import Host
from linvit.errors import LinvitError
from linvit.measurement.record import environment
from linvit.measurement.speed import failure
from linvit.models.dense import DenseModel

BUDGETS = {"cpu": 0.4, "cuda": 0.15}  # seconds for each point and model
SLOW, SLOW_BATCH = 5.0, 3.0  # a pass that is likely to take more seconds is left out
TRAINING = 4.0  # times an inference, when a training step's time is guessed


class Contender:
    """A candidate on its way up the ladder, which is built anew for each size."""

    def __init__(self, structure: Structure, candidate: Candidate) -> None:
        self.structure = replace(structure, candidate=candidate)
        self.model: nn.Module | None = None
        self.failed = ""  # why there is none
        self.tokens, self.degree = 1, 2
        self.seen: tuple[int, float] | None = None  # tokens and seconds of an image, to guess the next from

    def build(self, size: int, device: torch.device) -> None:
        """Build for a size, or note why that cannot be."""
        self.model = None
        try:
            model = build_model(replace(self.structure, size=size))
            self.tokens = tokens_of(model, size) or size**2
            hosts = [module for _, module in find_hosts(model)]
            self.degree = 1 if all(isinstance(h, Host) and h.mechanism.capabilities.linear for h in hosts) else 2
            self.model = model.to(device)
        except (LinvitError, torch.OutOfMemoryError) as error:
            self.failed = reason_of(error)

    def guess(self, point: SpeedPoint) -> float:
        """About how many seconds a pass will take; 0 before anything is known."""
        if self.seen is None:
            return 0.0
        tokens, seconds = self.seen
        grown = seconds * point.batch * (self.tokens / tokens) ** self.degree
        return grown * TRAINING if point.what == "training" else grown

    def call(self, point: SpeedPoint) -> Call:
        """The pass to be timed, after its output has shown to be finite."""
        if self.model is None:
            raise LinvitError(self.failed)
        if (seconds := self.guess(point)) > (SLOW if point.batch == 1 else SLOW_BATCH):
            raise LinvitError(f"left out: about {seconds:.0f} s a pass")
        generator = torch.Generator(point.device).manual_seed(0)
        images = torch.randn(point.batch, 3, point.size, point.size, generator=generator, device=point.device)
        if point.what == "inference":
            call = inference_pass(self.model, images, point.precision, compiled=point.compiled)
        else:
            how = {"compiled": point.compiled, "recorded": point.cuda_graph}
            call = training_pass(self.model, images, point.precision, **how)
        if not is_finite(call()):
            raise LinvitError("the output is not finite")
        return call

    def learn(self, point: SpeedPoint, milliseconds: float) -> None:
        if point.what == "inference":
            self.seen = (self.tokens, milliseconds / 1e3 / point.batch)


def measure_speed(
    identity: SpeedIdentity, *, watch: Callable[[dict[str, Any]], None] | None = None, budget: float | None = None
) -> tuple[Environment, tuple[SpeedPoint, ...]]:
    """Where a speed job was timed, and its rows; `watch` hears each row."""
    devices = devices_for(identity)
    rows = []
    for device in devices:
        with timing_on(device) as alone:
            for row in ladder(identity, device, BUDGETS[device.type] if budget is None else budget):
                rows.append(replace(row, shared=not alone))
                if watch is not None:
                    watch({"kind": "speed", **to_plain(rows[-1])})
    return Environment(**environment(devices[-1])), tuple(rows)


def devices_for(identity: SpeedIdentity) -> list[torch.device]:
    """The devices asked for that are present; the GPU comes last."""
    present = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = [name for name in present if name in (identity.devices or present)]
    if not found:
        raise LinvitError(f"this machine has none of the devices to measure on: {', '.join(identity.devices)}")
    return [torch.device(name) for name in found]


def ladder(identity: SpeedIdentity, device: torch.device, budget: float) -> Iterator[SpeedPoint]:
    """The rows of one device, from the smallest size up."""
    ours = Contender(identity, identity.candidate)
    softmax = ours if identity.candidate == SOFTMAX else Contender(identity, SOFTMAX)
    for size in sorted(identity.ladder):
        for contender in dict.fromkeys((ours, softmax)):
            contender.build(size, device)
        for point in points(identity, size, device):
            yield time_point(point, ours, softmax, budget)
            clock.clean(device, compiled=point.compiled)


def points(identity: SpeedIdentity, size: int, device: torch.device) -> Iterator[SpeedPoint]:
    """What is to be timed: latency, throughput, and at the trained size a training step."""
    cuda = device.type == "cuda"
    precision = identity.precision if identity.precision != "auto" else "bf16" if cuda else "fp32"
    latency = SpeedPoint(
        device=device.type,
        size=size,
        tokens=0,
        batch=1,
        precision=precision,
        compiled=identity.compile,
        cuda_graph=bool(identity.cuda_graph) and cuda,
    )
    yield latency
    if identity.batch > 1:
        yield replace(latency, batch=identity.batch)
    if size == identity.size:
        yield replace(latency, batch=identity.batch, what="training")


def time_point(wanted: SpeedPoint, ours: Contender, softmax: Contender, budget: float) -> SpeedPoint:
    """One row. Softmax is timed by turns with the candidate; where it cannot do this, there is no ratio."""
    point, device = replace(wanted, tokens=ours.tokens), torch.device(wanted.device)
    calls: dict[Contender, Call] = {}
    for contender in dict.fromkeys((ours, softmax)):
        try:
            calls[contender] = contender.call(point)
        except Exception as error:  # a compiler or kernel that fails must not cost the rows that are still to come
            clock.clean(device, compiled=point.compiled)
            if contender is ours:
                return replace(point, note=reason_of(error), cuda_graph=False)
    assert ours.model is not None
    ours.model.zero_grad(set_to_none=True)  # a step's gradients count as its own
    peak, replayed = None, False
    times: dict[Contender, clock.Timing] = {}
    try:
        peak = clock.peak_memory(calls[ours], device)
        replayed, times = clocked(calls, point, budget)
    except torch.OutOfMemoryError:
        pass
    if not times:  # both at once do not fit
        calls = {ours: calls[ours]}
        clock.clean(device, compiled=point.compiled)
        replayed, times = clocked(calls, point, budget)
    for contender, timing in times.items():
        contender.learn(point, timing.low)
    own = times[ours]
    return replace(
        point,
        cuda_graph=replayed,
        milliseconds=Milliseconds(own.median, own.low, own.high),
        images_per_second=point.batch / own.median * 1e3,
        peak_bytes=peak,
        ratio=times[softmax].median / own.median if softmax in times else None,
    )


def clocked(
    calls: Mapping[Contender, Call], point: SpeedPoint, budget: float
) -> tuple[bool, dict[Contender, clock.Timing]]:
    """Whether the calls were replayed, and their times, by turns."""
    timed, replayed = list[Callable[[], object]](calls.values()), point.cuda_graph
    if replayed:
        try:
            timed = [clock.record([call]) for call in timed]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # something in one of them asks the host
            timed, replayed = list(calls.values()), False
    found = clock.by_turns(timed, torch.device(point.device), latency=point.batch == 1, budget=budget)
    return replayed, dict(zip(calls, found, strict=True))


def reason_of(error: Exception) -> str:
    found = failure(error)
    return str(error) if isinstance(error, LinvitError) else found.get("reason", found["status"])


def tokens_of(model: nn.Module, size: int) -> int | None:
    """The patches an image of the size it was built for is cut into; None where a model begins in another way. Of a
    detector or segmenter, the places of its trunk's finest map."""
    if isinstance(model, DenseModel):
        return (-(-size // model.backbone.layout.strides[0])) ** 2
    embed: Any = getattr(model, "patch_embed", None)
    if getattr(embed, "grid_size", None) is not None:
        return math.prod(embed.grid_size)
    patch: Any = getattr(embed, "patch_size", None)
    if patch is None:
        return None
    return (-(-size // (patch if isinstance(patch, int) else patch[0]))) ** 2
