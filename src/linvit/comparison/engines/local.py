"""The engine in this process: one task after another, runs before speeds.

Tasks come with all seeds of a candidate in a row, so that compiled code is used again.
"""

from __future__ import annotations

from collections.abc import Sequence

from linvit.comparison.engines import Board, Execute, Summary, Watch, attend, drain, real_execute
from linvit.comparison.grid import Task
from linvit.comparison.store import Store


def run(
    tasks: Sequence[Task],
    store: Store,
    *,
    watch: Watch,
    retry: bool = False,
    device: str = "auto",
    execute: Execute = real_execute,
) -> Summary:
    """Do the tasks here. What other processes work on is waited for at the end, and taken over if they die."""
    board = Board(tasks, store, retry=retry)

    def work(task: Task) -> bool:
        return attend(task, store, watch, execute, device=device)

    speeds = [task for task in tasks if task.kind == "speed"]
    runs = [task for task in tasks if task.kind != "speed"]
    drain(board, runs, work, wait=False)
    drain(board, speeds, work, wait=False)
    drain(board, tasks, work, wait=True)
    return board.summary()
