"""The engine where `torchrun` started several processes: each run is done by all of them.

For runs that are too large for one GPU. The first process claims, writes and says what comes next. Speeds are not
timed: a plain `linvit compare` on the same store does that.
"""

from __future__ import annotations

from collections.abc import Sequence

from linvit.comparison.claims import Claim
from linvit.comparison.engines import Board, Execute, Summary, Watch, real_execute
from linvit.comparison.grid import Task
from linvit.comparison.store import Store
from linvit.training.processes import Processes, close_process_group


def run(
    tasks: Sequence[Task],
    store: Store,
    *,
    watch: Watch,
    retry: bool = False,
    execute: Execute = real_execute,
) -> Summary:
    """Do the runs one after another, all processes at each. What others work on is left to them."""
    processes = Processes()
    board = Board([task for task in tasks if task.kind != "speed"], store, retry=retry)
    tried: set[str] = set()
    while True:
        task, claim = next_task(board, store, tried) if processes.first else (None, None)
        key = processes.broadcast_object(task.key if task is not None else None)
        if key is None:
            summary = board.summary()
            close_process_group()
            return summary
        tried.add(key)
        work(board.by_key[key], store, claim, watch, execute, processes)
        processes.wait()


def next_task(board: Board, store: Store, tried: set[str]) -> tuple[Task | None, Claim | None]:
    for task in board.open():
        if task.key not in tried and board.blocked(task) is None:
            claim = store.claim(task)
            if claim is not None:
                return task, claim
    return None, None


def work(
    task: Task,
    store: Store,
    claim: Claim | None,
    watch: Watch,
    execute: Execute,
    processes: Processes,
) -> None:
    """Do a task; who holds the claim writes it down, when nobody needs the work folder any more. An error ends the
    other processes, which would wait for ever."""
    try:
        watch(task, {"kind": "start"})
        result = execute(task, store, device=processes.device.type, watch=lambda record: watch(task, record))
        processes.wait()
        if claim is not None:
            store.write(task, result)
            watch(task, {"kind": "done"})
    except Exception as error:
        if claim is not None:
            watch(task, {"kind": "failed", "error": store.fail(task, error)["error"]})
        raise
    finally:
        if claim is not None:
            claim.release()
