"""The learning rate over the steps of a stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from linvit.training.config import Config, Stage


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine or nothing, then a rest at the lowest. A plain function of the step, so that a
    resumed run needs no state to go on with it."""

    peak: float
    steps: int  # warm-up and cosine
    warmup: int = 0
    start: float = 0.0
    lowest: float = 0.0
    prefix: bool = False  # the cosine begins after the warm-up; else the warm-up hides its first part
    cosine: bool = True

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start + (self.peak - self.start) * step / self.warmup
        if not self.cosine:
            return self.peak if step < self.steps else self.lowest
        done, whole = (step - self.warmup, self.steps - self.warmup) if self.prefix else (step, self.steps)
        if done >= whole:
            return self.lowest
        return self.lowest + (self.peak - self.lowest) * 0.5 * (1 + math.cos(math.pi * done / whole))


def stage_schedule(config: Config, stage: Stage, steps: int, epoch_steps: float) -> Schedule:
    """The schedule of a stage of so many steps. The cool-down belongs to a training of one stage; of several, each has
    its warm-up, of a fifth of its steps at most. A training that was cut down to few epochs warms up for half of them
    at most."""
    rest = 0 if config.stages else round(config.cooldown_epochs * epoch_steps)
    longest = steps // 5 if len(config.stages) > 1 else (steps - rest) // 2
    return Schedule(
        peak=config.scaled(config.lr if stage.lr is None else stage.lr),
        steps=steps - rest,
        warmup=min(round(config.warmup_epochs * epoch_steps), longest),
        start=config.warmup_lr,
        lowest=config.min_lr,
        prefix=config.warmup_prefix,
        cosine=config.schedule == "cosine",
    )
