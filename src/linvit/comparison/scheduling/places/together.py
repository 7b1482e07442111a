"""Processes that `torchrun` started, as one place: each run is done by all of them.

For runs that are too large for one GPU. The first process schedules and the others follow it. Speeds are not timed: a
plain `linvit compare` on the same store does that. What others work on is left to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linvit.comparison.description.task import Task
from linvit.comparison.scheduling.board import Board, Summary
from linvit.comparison.scheduling.places.here import Here
from linvit.comparison.scheduling.places.place import Execute, Record
from linvit.comparison.scheduling.scheduler import Scheduler, Watch
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from linvit.training.processes import Processes, close_process_group


class Together(Here):
    """An error ends the process, and with it the others, which would wait for ever."""

    patient = False

    def __init__(self, execute: Execute | None = None) -> None:
        self.processes = Processes()
        super().__init__(execute, device=self.processes.device.type)

    def timing_slots(self) -> list[Any]:
        return []

    def do(self, task: Task, shared: int, watch: Any) -> Record:
        self.tell(task.key)
        ended = super().do(task, shared, watch)
        if "result" in ended:
            self.processes.wait()  # nobody needs the work folder any more
        return ended

    def check(self, task: Task, ended: Record) -> None:
        if "failure" in ended:
            raise LinvitError(f"{task.label.candidate} failed, and with it all processes: {ended['failure'].error}")

    def tell(self, key: str | None) -> str | None:
        """What the first process says, in every process."""
        return self.processes.broadcast_object(key)

    def follow(self, board: Board) -> None:
        """Do what the first process says, for as long as it says something."""
        while (key := self.tell(None)) is not None:
            self.execute(board.by_key[key], self.store, device=self.device, shared=1, watch=lambda record: None)
            self.processes.wait()


def run(
    tasks: Sequence[Task], store: Store, *, watch: Watch, retry: bool = False, execute: Execute | None = None
) -> Summary:
    """Do the runs one after another, all processes at each."""
    place = Together(execute)
    board = Board([task for task in tasks if task.kind != "speed"], store, retry=retry)
    with place.opened(store, board.tasks):
        if place.processes.first:
            Scheduler(board, place, watch).run()
            place.tell(None)
        else:
            place.follow(board)
    place.processes.wait()
    summary = board.summary()
    close_process_group()
    return summary
