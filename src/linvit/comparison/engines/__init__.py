"""Where tasks are done: in this process, on the GPUs of this machine, or on a Ray cluster.

Every engine has `run(tasks, store, *, watch, retry) -> Summary`. All do the same to a task: claim it, do it, write its
result or its failure, and go on with the next; so the result files do not tell which engine it was. The store is the
queue: several engines, on several machines, may work on one at the same time.

`watch(task, record)` hears what happens. Records have a kind: `start`, then those of the training (`train`, `eval`,
`note`), and `done`, `failed` with its error, or `lost` when the worker died and the task is given to another.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from linvit.comparison.claims import ClaimLost
from linvit.comparison.grid import Task
from linvit.comparison.store import Store
from linvit.errors import LinvitError

Watch = Callable[[Task, dict[str, Any]], None]
Execute = Callable[..., dict[str, Any]]
POLL = 2.0  # seconds between two looks at what others work on


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


class DeviceSpoilt(LinvitError):
    """A failure that leaves this process without its GPU, such as an illegal access."""


class Board:
    """The tasks of one engine's run, and how each stands. A task that failed before is left alone unless `retry`;
    `forgiven` says how many failures of each count as before."""

    def __init__(
        self,
        tasks: Iterable[Task],
        store: Store,
        *,
        retry: bool = False,
        anywhere: bool = False,
        forgiven: dict[str, int] | None = None,
    ) -> None:
        self.tasks, self.store, self.anywhere = list(tasks), store, anywhere
        self.by_key = {task.key: task for task in self.tasks}
        self.earlier = {task.key for task in self.tasks if store.finished(task, anywhere=anywhere)}
        self.seen = set(self.earlier)
        counted = {task.key: len(store.failures(task.key)) if retry else 0 for task in self.tasks}
        self.forgiven = counted if forgiven is None else forgiven

    def finished(self, task: Task) -> bool:
        if task.key not in self.seen and self.store.finished(task, anywhere=self.anywhere):
            self.seen.add(task.key)
        return task.key in self.seen

    def failed(self, task: Task) -> bool:
        return not self.finished(task) and len(self.store.failures(task.key)) > self.forgiven[task.key]

    def blocked(self, task: Task) -> str | None:
        """Whether a task lacks what it needs: for good ("failed"), or for now ("waiting")."""
        state = None
        for key in task.needs:
            other = self.by_key.get(key)
            if other is None:
                ready = self.store.read(self.store.folder / "runs" / f"{key}.json") is not None
            else:
                ready = self.finished(other)
            if not ready:
                if other is None or self.failed(other):
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


def drain(
    board: Board,
    tasks: Iterable[Task],
    work: Callable[[Task], bool],
    *,
    wait: bool,
    order: Callable[[list[Task]], list[Task]] = list,
) -> None:
    """Do tasks, always the first in `order` that is free, until none is left. With `wait`, stay for those that others
    work on, in case they are lost; without, only for teachers that ours need. `work` says whether it got the task."""
    left = {task.key for task in tasks}
    while True:
        ready = order([task for task in board.open() if task.key in left])
        taken = next((task for task in ready if board.blocked(task) is None and work(task)), None)
        if taken is not None:
            left.discard(taken.key)  # whatever came of it: nothing is done twice
        elif not ready or not (wait or any(board.blocked(task) for task in ready)):
            return
        else:
            time.sleep(POLL)


def attend(
    task: Task,
    store: Store,
    watch: Watch,
    execute: Execute,
    *,
    device: str = "auto",
    shared: int = 1,
) -> bool:
    """Claim a task, do it and write down what came of it. False where another has it."""
    claim = store.claim(task)
    if claim is None:
        return False
    with claim:

        def hear(record: dict[str, Any]) -> None:
            claim.check()
            watch(task, record)

        try:
            hear({"kind": "start"})
            result = execute(task, store, device=device, shared=shared, watch=hear)
            store.write(task, result)
            watch(task, {"kind": "done"})
        except ClaimLost:
            return False
        except Exception as error:
            failure = store.fail(task, error)
            watch(task, {"kind": "failed", "error": failure["error"]})
        else:
            return True
    clean_up(task)
    return True


def clean_up(task: Task) -> None:
    """Give back what a failed task held on the device, and see whether that still works."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            name = task.label["candidate"]
            raise DeviceSpoilt(f"{name} left the GPU unusable ({reason}): start the command again to go on") from None


def real_execute(task: Task, store: Store, **options: Any) -> dict[str, Any]:
    """What `running.execute` does; that imports the whole training, and is not needed to look at a store."""
    from linvit.comparison.running import execute

    return execute(task, store, **options)
