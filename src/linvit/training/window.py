"""What happened since the last log line, held on the device until it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor


class Window:
    """Sums over steps, and the flag that a loss was no number. Reading it waits for the device; nothing else does."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.bad = torch.zeros((), device=accelerator.device)  # 1 from the first step whose loss is no number
        self.good = torch.zeros((), device=accelerator.device)  # the step before which all were
        self.spent = 0.0  # seconds of training in all windows so far
        self.names: list[str] = []
        self.sums, self.norms = (torch.zeros((), device=accelerator.device) for _ in range(2))
        self.begin()

    def begin(self) -> None:
        self.began = time.perf_counter()
        self.timed = 0
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

    def close_step(self, norm: Tensor, wrong: Tensor) -> None:
        """Add a step's gradient norm, and whether anything in it was no number."""
        self.norms.add_(norm)
        self.bad.copy_(torch.maximum(self.bad, (wrong > 0).float()))
        self.good.add_(1 - self.bad)

    def count(self, parts: int) -> None:
        """A step of so many parts was taken."""
        self.parts += parts
        self.steps += 1
        self.timed += 1

    def stop_clock(self) -> None:
        """What comes now, an evaluation or a checkpoint, is no training time; `begin` or `start_clock` ends it."""
        self.spent += time.perf_counter() - self.began

    def start_clock(self) -> None:
        self.began, self.timed = time.perf_counter(), 0

    def read(self) -> tuple[dict[str, float], int | None]:
        """Means over the window and all processes; and the first bad step, if there was one."""
        means = self.accelerator.reduce(self.sums, reduction="mean") / self.parts
        rest = torch.stack([self.norms / self.steps, self.bad, self.good])
        *values, norm, bad, good = torch.cat([means, rest]).tolist()
        found = dict(zip(self.names, values, strict=True))
        return {**found, "gradient_norm": norm}, int(good) if bad else None

    def images_per_second(self, batch_size: int) -> float | None:
        """Since the clock started; asked after `read`, when the device has caught up."""
        return round(self.timed * batch_size / (time.perf_counter() - self.began), 1) if self.timed else None
