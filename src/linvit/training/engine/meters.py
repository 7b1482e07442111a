"""What happened since the last log line, held on the device until it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from linvit.training.processes import Processes


class Meters:
    """Sums over the steps since the last log line, and the flag that a loss was not finite. Reading them waits for the
    device; nothing else does."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.bad = torch.zeros((), device=processes.device)  # 1 from the first step whose loss is NaN or infinite
        self.good = torch.zeros((), device=processes.device)  # the step before which all were finite
        self.sums, self.norms = (torch.zeros((), device=processes.device) for _ in range(2))
        self.names: list[str] = []
        self.seconds = 0.0  # of training so far
        self.speeds: list[float] = []  # images a second, one for each time it was read
        self.begin()

    def begin(self) -> None:
        """Count from here, and let the clock run."""
        self.start_clock()
        self.steps = self.parts = 0
        self.sums.zero_()
        self.norms.zero_()

    def note(self, entries: Mapping[str, Tensor]) -> None:
        """Add what an objective returned for a batch. The sums stay where they are, as a recorded step needs it."""
        self.names = list(entries)
        values = torch.stack([value.detach().float() for value in entries.values()])
        if self.sums.shape != values.shape:
            self.sums = torch.zeros_like(values)
        self.sums.add_(values)

    def close_step(self, norm: Tensor, bad: Tensor) -> None:
        """Add a step's gradient norm, and whether anything in it was not finite."""
        self.norms.add_(norm)
        self.bad.copy_(torch.maximum(self.bad, (bad > 0).float()))
        self.good.add_(1 - self.bad)

    def count(self, parts: int) -> None:
        """A step of so many parts was taken."""
        self.parts += parts
        self.steps += 1
        self.timed += 1

    def stop_clock(self) -> None:
        """What comes now, an evaluation or a checkpoint, is no training time; `begin` or `start_clock` ends it."""
        self.seconds += time.perf_counter() - self.began

    def start_clock(self) -> None:
        self.began, self.timed = time.perf_counter(), 0

    def read(self) -> tuple[dict[str, float], int | None]:
        """Means over the steps and all processes; and the first bad step, if there was one."""
        means = self.processes.mean(self.sums) / self.parts
        others = torch.stack([self.norms / self.steps, self.bad, self.good])
        *values, norm, bad, good = torch.cat([means, others]).tolist()
        found = dict(zip(self.names, values, strict=True))
        return {**found, "gradient_norm": norm}, int(good) if bad else None

    def images_per_second(self, batch_size: int) -> float | None:
        """Since the clock started; asked after `read`, when the device has caught up."""
        if not self.timed:
            return None
        self.speeds.append(round(self.timed * batch_size / (time.perf_counter() - self.began), 1))
        return self.speeds[-1]

    @property
    def speed(self) -> float | None:
        """The median of the speeds, without the first, which warms up."""
        return round(median(self.speeds[1:] or self.speeds), 1) if self.speeds else None
