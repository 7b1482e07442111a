"""The engine where `accelerate launch` or `torchrun` started several processes: each run is done by all of them.

For runs that are too large for one GPU. The first process claims, writes and says what comes next. Speeds are not
timed: a plain `linvit compare` on the same store does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from linvit.comparison.claims import Claim
from linvit.comparison.engines import Board, Execute, Summary, Watch, real_execute
from linvit.comparison.grid import Task
from linvit.comparison.store import Store
from linvit.training.processes import part


def run(
    tasks: Sequence[Task],
    store: Store,
    *,
    watch: Watch,
    retry: bool = False,
    execute: Execute = real_execute,
) -> Summary:
    """Do the runs one after another, all processes at each. What others work on is left to them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = PartialState(cpu=device == "cpu")
    board = Board([task for task in tasks if task.kind != "speed"], store, retry=retry)
    tried: set[str] = set()
    while True:
        task, claim = next_task(board, store, tried) if state.is_main_process else (None, None)
        said: list[Any] = [task.key if task is not None else None]
        broadcast_object_list(said)
        if said[0] is None:
            summary = board.summary()
            part()
            return summary
        tried.add(said[0])
        task = board.by_key[said[0]]
        work(task, store, claim, watch, execute, device, state)
        state.wait_for_everyone()


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
    device: str,
    state: PartialState,
) -> None:
    """Do a task; who holds the claim writes it down, when nobody needs the work folder any more. An error ends the
    other processes, which would wait for ever."""
    try:
        watch(task, {"kind": "start"})
        result = execute(task, store, device=device, watch=lambda record: watch(task, record))
        state.wait_for_everyone()
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
