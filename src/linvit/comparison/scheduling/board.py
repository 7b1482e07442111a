"""How the tasks of a comparison stand, by what the store holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from linvit.comparison.description.task import Task
from linvit.comparison.scheduling.store import Store, hardware_for


@dataclass(frozen=True)
class Summary:
    """How the tasks stand at the end: keys of those finished here, finished before or elsewhere, failed, and missing
    because what they need failed."""

    done: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.failed and not self.missing

    @property
    def anything(self) -> bool:
        """Whether there is something to report."""
        return bool(self.done or self.earlier or self.failed)


class Board:
    """The tasks of one command, and how each stands. A task that failed before is left alone unless `retry`. A speed is
    finished when it is there for each kind of `hardware` that is to time it, of this machine unless told."""

    def __init__(
        self,
        tasks: Iterable[Task],
        store: Store,
        *,
        retry: bool = False,
        hardware: Callable[[Task], list[str]] = lambda task: [hardware_for(task)],
    ) -> None:
        self.tasks, self.store, self.hardware = list(tasks), store, hardware
        self.by_key = {task.key: task for task in self.tasks}
        self.seen: set[tuple[str, str]] = set()
        self.earlier = {task.key for task in self.tasks if self.finished(task)}
        self.forgiven = {task.key: len(store.failures(task.key)) if retry else 0 for task in self.tasks}

    def finished(self, task: Task) -> bool:
        return all(self.there(task, kind) for kind in (self.hardware(task) if task.kind == "speed" else [""]))

    def there(self, task: Task, hardware: str) -> bool:
        """Whether one result file is there, which it then stays."""
        if (task.key, hardware) not in self.seen and self.store.finished(task, hardware):
            self.seen.add((task.key, hardware))
        return (task.key, hardware) in self.seen

    def failed(self, task: Task) -> bool:
        return not self.finished(task) and len(self.store.failures(task.key)) > self.forgiven[task.key]

    def blocked(self, task: Task) -> str | None:
        """Whether a task lacks what it needs: for good ("failed"), or for now ("waiting")."""
        state = None
        for key in task.needs:
            other = self.by_key.get(key)
            if other is None and self.store.read(self.store.run_path(key)) is None:
                return "failed"
            if other is not None and not self.finished(other):
                if self.failed(other):
                    return "failed"
                state = "waiting"
        return state

    def open(self) -> list[Task]:
        """What is left to do, or to wait for."""
        return [t for t in self.tasks if not self.finished(t) and not self.failed(t) and self.blocked(t) != "failed"]

    def summary(self) -> Summary:
        finished = {task.key for task in self.tasks if self.finished(task)}
        failed = {task.key for task in self.tasks if self.failed(task)}
        return Summary(
            done=tuple(key for key in self.by_key if key in finished - self.earlier),
            earlier=tuple(key for key in self.by_key if key in self.earlier),
            failed=tuple(key for key in self.by_key if key in failed),
            missing=tuple(key for key in self.by_key if key not in finished | failed),
        )
