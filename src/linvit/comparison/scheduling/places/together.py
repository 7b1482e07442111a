"""Processes that `torchrun` or `accelerate launch` started, as one place: each run is done by all of them.

For runs that are too large for one GPU. The first process schedules and the others follow it. Speeds are not timed: a
plain `linvit compare` on the same store does that. What others work on is left to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from linvit.comparison.description.task import Task
from linvit.comparison.scheduling.board import Board, Summary
from linvit.comparison.scheduling.places.here import Here
from linvit.comparison.scheduling.places.place import Execute, Record
from linvit.comparison.scheduling.scheduler import Scheduler, Watch
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from linvit.training.processes import part


class Together(Here):
    """An error ends the process, and with it the others, which would wait for ever."""

    patient = False

    def __init__(self, execute: Execute | None = None) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(execute, device=device)
        self.state = PartialState(cpu=device == "cpu")

    def timing_slots(self) -> list[Any]:
        return []

    def do(self, task: Task, shared: int, watch: Any) -> Record:
        self.tell(task.key)
        ended = super().do(task, shared, watch)
        if "result" in ended:
            self.state.wait_for_everyone()  # nobody needs the work folder any more
        return ended

    def check(self, task: Task, ended: Record) -> None:
        if "failure" in ended:
            raise LinvitError(f"{task.label.candidate} failed, and with it all processes: {ended['failure'].error}")

    def tell(self, key: str | None) -> str | None:
        """What the first process says, in every process."""
        said = [key]
        broadcast_object_list(said)
        return said[0]

    def follow(self, board: Board) -> None:
        """Do what the first process says, for as long as it says something."""
        while (key := self.tell(None)) is not None:
            self.execute(board.by_key[key], self.store, device=self.device, shared=1, watch=lambda record: None)
            self.state.wait_for_everyone()


def run(
    tasks: Sequence[Task], store: Store, *, watch: Watch, retry: bool = False, execute: Execute | None = None
) -> Summary:
    """Do the runs one after another, all processes at each."""
    place = Together(execute)
    board = Board([task for task in tasks if task.kind != "speed"], store, retry=retry)
    with place.opened(store, board.tasks):
        if place.state.is_main_process:
            Scheduler(board, place, watch).run()
            place.tell(None)
        else:
            place.follow(board)
    place.state.wait_for_everyone()
    summary = board.summary()
    part()
    return summary
