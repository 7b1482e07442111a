"""Clocks: how long a call takes, how much memory it peaks at, and how fast memory can be copied.

On a GPU the time is that of a replayed CUDA graph, so that launches do not hide in it; `eager` beside it is what plain
Python calls cost. Calls come as a list, one per set of inputs, and are taken in turn: with one small set again and
again the cache would be measured.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median, quantiles

import torch

Calls = Sequence[Callable[[], object]]
MEBI = 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median and the quartiles around it."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(median(samples), low, high, len(samples))


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection inside: after a compiler's work it takes longer than many a call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def sample(calls: Calls, device: torch.device) -> float:
    """Seconds per call of these calls, sent one after the other and then waited for."""
    begin = time.perf_counter()
    for call in calls:
        call()
    synchronise(device)
    return max((time.perf_counter() - begin) / len(calls), 1e-9)


@undisturbed()
def by_turns(
    calls: Calls, device: torch.device, *, latency: bool = False, budget: float = 0.4, least: int = 0
) -> list[Timing]:
    """Different calls in turn, so that whatever happens to the machine meantime happens to all of them. For `latency`
    each call is waited for; else a sample on a GPU is a burst. The budget is seconds for each call, and what takes much
    longer is sampled twice, unless `least` asks for more."""
    synchronise(device)
    once = [sample([call], device) for call in calls]
    single = latency or device.type == "cpu"
    bursts = [1 if single else max(1, min(20, int(budget / (5 * seconds)))) for seconds in once]
    spent = sum(seconds * burst for seconds, burst in zip(once, bursts, strict=True)) / len(calls)
    rounds = max(least or (1 if spent > 2 * budget else 3), min(200, int(budget / spent)))
    samples = [once] if rounds == 1 else []
    samples += [
        [sample([call] * burst, device) for call, burst in zip(calls, bursts, strict=True)] for _ in range(rounds)
    ]
    return [Timing.of([seconds * 1e3 for seconds in column]) for column in zip(*samples, strict=True)]


def eager(calls: Calls, device: torch.device, *, budget: float = 0.3, least: int = 5) -> Timing:
    """Plain calls by the host's clock. On a GPU a sample is a burst of calls: it shows what the host can send."""
    turn = cycle(calls)
    return by_turns([lambda: next(turn)()], device, budget=budget, least=least)[0]


def graph(calls: Calls, *, budget: float = 0.2) -> Timing:
    """The calls, once each, as one CUDA graph; its replays are timed with device events."""
    replay = record(calls)
    replay()

    def replayed() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    torch.cuda.synchronize()
    repeats = max(5, min(100, int(budget * 1e3 / max(replayed(), 1e-3))))
    return Timing.of([replayed() / len(calls) for _ in range(repeats)])


def record(calls: Calls) -> Callable[[], None]:
    """The calls, once each, as a CUDA graph that one call replays; RuntimeError where something in them asks the
    host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with recording(captured):
        for call in calls:
            call()
    return captured.replay


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


def sets_for(set_bytes: int, device: torch.device) -> int:
    """How many sets of inputs to take in turn so that none is still in the last-level cache when its turn comes."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 32 * MEBI
    return max(1, min(64 if device.type == "cuda" else 4, -(-2 * cache // max(set_bytes, 1))))


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Bytes a call holds at its peak beyond what was there before: outputs, gradients and everything in between."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its every start and stop otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    allocations = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, size in allocations:
        held += size
        peak = max(peak, held)
    return peak


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read plus written: the ceiling for anything that moves memory.

    In plain calls: inside a CUDA graph a copy may be the copy engine's business, which is slower.
    """
    size = (2048 if device.type == "cuda" else 128) * MEBI
    source = torch.rand(size // 4, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    copy()
    return 2 * size / (eager([copy], device).low * 1e-3)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean(device: torch.device, *, compiled: bool = True) -> None:
    """Give back what a model that is gone held of the device and the compiler."""
    if compiled:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
