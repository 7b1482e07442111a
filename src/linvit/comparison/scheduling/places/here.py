"""This process as a place: one task after another."""

from __future__ import annotations

from typing import Any

from linvit.comparison.description.task import Task
from linvit.comparison.scheduling.places.place import Execute, Hear, Place, Record, TimingSlot, attempt
from linvit.errors import LinvitError


class DeviceSpoilt(LinvitError):
    """A failure that leaves this process without its GPU."""


class Here(Place):
    """A task is done while it is polled."""

    def __init__(self, execute: Execute | None = None, *, device: str = "auto") -> None:
        super().__init__(execute)
        self.device = device
        self.next: tuple[Task, str, int] | None = None

    def capacity(self) -> int:
        return 1

    def hire(self, task: Task, slot: TimingSlot | None) -> None:
        return None

    def send(self, worker: None, task: Task, name: str, *, shared: int) -> None:
        self.next = task, name, shared

    def poll(self, hear: Hear) -> None:
        assert self.next is not None
        (task, name, shared), self.next = self.next, None
        ended = self.do(task, shared, lambda record: hear(name, record))
        hear(name, ended)
        self.check(task, ended)

    def check(self, task: Task, ended: Record) -> None:
        """Whether this process can go on after a task."""
        if ended.get("spoilt"):
            who = task.label.candidate
            raise DeviceSpoilt(f"{who} left the GPU unusable ({ended['spoilt']}): start the command again to go on")

    def do(self, task: Task, shared: int, watch: Any) -> Record:
        return attempt(task, self.store, self.execute, device=self.device, shared=shared, watch=watch)

    def dismiss(self, worker: None, *, kill: bool = False) -> None:
        self.next = None
