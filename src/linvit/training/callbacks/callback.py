"""The hooks of the training loop, for what only some recipes need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from linvit.training.config import Stage
from linvit.training.contract import Batch, Objective


@dataclass
class Position:
    """Where a run is: `step` steps are done; the stage goes from step `start` to `end`, and begins with a warm-up."""

    stage: Stage
    step: int
    start: int
    end: int
    warmup: int = 0

    @property
    def progress(self) -> float:
        """The share of the stage after its warm-up that is over; negative during the warm-up."""
        return (self.step - self.start - self.warmup) / max(1, self.end - self.start - self.warmup)


class Callback:
    """Called at fixed points of the loop; what a callback does not need does nothing. Of a step in the making `step`
    counts the steps before it, after a step that one as well."""

    shown: nn.Module | None = None
    """A model to evaluate and save in place of the one in training."""

    def before_stage(self, at: Position) -> None:
        """A stage begins, or goes on from a checkpoint."""

    def wrap(self, objective: Objective, at: Position) -> Objective:
        """What a stage minimises, with what is added to it."""
        return objective

    def before_step(self, at: Position) -> None: ...

    def change_batch(self, batch: Batch, step: int) -> Batch:
        return batch

    def after_step(self, at: Position) -> None: ...

    def before_evaluation(self, model: nn.Module) -> None:
        """The shown model is going to be evaluated."""

    def log(self, step: int) -> dict[str, Any]:
        """Entries for the next log line."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this callback: tensors under names of their own, and `state` for plain data."""
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Take back what is in a checkpoint."""

    def close(self) -> None:
        """The run is over, or has failed."""
