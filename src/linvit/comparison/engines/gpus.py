"""The engine on all GPUs of this machine: a worker process for each, or several that share one.

Workers claim tasks from the store themselves. Speeds are timed when no run is left, by one worker alone. A worker that
dies is replaced, and its task tried again at most twice. Without a GPU the workers share the CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from linvit.comparison.engines import POLL, Board, DeviceSpoilt, Execute, Summary, Watch, attend, drain, real_execute
from linvit.comparison.grid import Task
from linvit.comparison.store import Store
from linvit.errors import LinvitError

TRIES = 3  # of a task whose worker dies
SPOILT = 3  # a worker's exit code when a failure spoilt its GPU for it: another process can use it
PATIENCE = 15.0  # seconds for a worker to stop when asked to
VISIBLE = "CUDA_VISIBLE_DEVICES"


def run(
    tasks: Sequence[Task],
    store: Store,
    *,
    watch: Watch,
    retry: bool = False,
    per_gpu: int = 1,
    execute: Execute = real_execute,
) -> Summary:
    """Do the tasks, `per_gpu` at a time on each GPU."""
    board = Board(tasks, store, retry=retry)
    gpus: list[str | None] = [*visible_gpus()] or [None]
    with crew(board, watch, execute) as workers:
        workers.drain([task for task in tasks if task.kind != "speed"], gpus * per_gpu, shared=per_gpu)
        workers.drain([task for task in tasks if task.kind == "speed"], gpus[:1])
        while left := [task for task in board.open() if task.key not in workers.done]:
            # others are at these, and may die
            if not all(store.claimed(task) for task in left):
                workers.drain(left, gpus[:1])
            time.sleep(POLL)
    return board.summary()


def visible_gpus() -> list[str]:
    """The GPUs this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get(VISIBLE)
    count = torch.cuda.device_count()
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


@contextmanager
def visible(gpu: str | None) -> Iterator[None]:
    """Processes started meanwhile see this GPU alone."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = gpu or ""
    try:
        yield
    finally:
        del os.environ[VISIBLE]
        os.environ.update({} if before is None else {VISIBLE: before})


class Crew:
    """The worker processes, and who works on what."""

    def __init__(self, board: Board, watch: Watch, execute: Execute) -> None:
        self.board, self.watch, self.execute = board, watch, execute
        # Forks of a process that has imported torch start faster, but must not meet CUDA.
        self.context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        if not torch.cuda.is_available():
            self.context.set_forkserver_preload([__name__])
        self.workers: dict[Connection, tuple[Any, str | None, float]] = {}
        self.busy: dict[Connection, str] = {}
        self.done: set[str] = set()
        self.losses: Counter[str] = Counter()
        self.stillborn = 0

    def drain(self, tasks: Sequence[Task], gpus: Sequence[str | None], *, shared: int = 1) -> None:
        """Let a worker for each of `gpus` do the tasks; those that others work on are left to them."""
        keys = {task.key for task in tasks}
        left = [task for task in self.board.open() if task.key in keys]
        self.tasks, self.shared, self.size = list(tasks), shared, min(len(gpus), len(left))
        for number, gpu in enumerate(gpus[: self.size]):
            self.start(gpu, number / self.size)
        while self.workers:
            for pipe in wait(list(self.workers)):
                assert isinstance(pipe, Connection)
                try:
                    key, record = pipe.recv()
                except (EOFError, OSError):
                    self.bury(pipe)
                else:
                    self.hear(pipe, key, record)

    def start(self, gpu: str | None, offset: float) -> None:
        """A new worker, which begins that far into the tasks."""
        ours, theirs = self.context.Pipe(duplex=False)
        store = self.board.store
        settings = {"folder": str(store.folder), "beat": store.beat, "stale": store.stale}
        settings |= {"shared": self.shared, "gpu": gpu, "offset": offset}
        process = self.context.Process(
            target=work_on,
            args=(theirs, self.board.tasks, self.tasks, self.board.forgiven, self.execute, settings),
        )
        with visible(gpu):
            process.start()
        theirs.close()
        self.workers[ours] = (process, gpu, offset)

    def hear(self, pipe: Connection, key: str, record: dict[str, Any]) -> None:
        if record["kind"] == "start":
            self.busy[pipe] = key
            self.stillborn = 0
        elif record["kind"] in ("done", "failed"):
            self.busy.pop(pipe, None)
            self.done.add(key)
        self.watch(self.board.by_key[key], record)

    def bury(self, pipe: Connection) -> None:
        """A worker has ended: well, or with a task that another must take."""
        process, gpu, offset = self.workers.pop(pipe)
        process.join()
        pipe.close()
        key = self.busy.pop(pipe, None)
        if key is not None:
            self.lose(self.board.by_key[key], process.exitcode)
        elif process.exitcode not in (0, SPOILT):
            self.stillborn += 1
            if self.stillborn >= TRIES:
                raise LinvitError(f"workers end with code {process.exitcode} before they begin: try --engine local")
        if process.exitcode:
            self.start(gpu, offset)

    def lose(self, task: Task, code: int | None) -> None:
        """Note a lost task; after the third time it has failed."""
        self.losses[task.key] += 1
        reason = f"its worker ended with code {code} (killed, or out of memory?)"
        self.watch(task, {"kind": "lost", "text": reason})
        if self.losses[task.key] < TRIES:
            return
        claim = self.board.store.claim(task)
        if claim is not None:
            with claim:
                failure = self.board.store.fail(task, f"{reason}, {TRIES} times")
            self.watch(task, {"kind": "failed", "error": failure["error"]})

    def stop(self) -> None:
        """Ask the workers to stop, and see to it that they do."""
        processes = [process for process, *_ in self.workers.values()]
        for process in processes:
            process.terminate()
        until = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.workers.clear()


@contextmanager
def crew(board: Board, watch: Watch, execute: Execute) -> Iterator[Crew]:
    made = Crew(board, watch, execute)
    try:
        yield made
    finally:
        made.stop()


def work_on(
    pipe: Connection,
    every: list[Task],
    tasks: list[Task],
    forgiven: dict[str, int],
    execute: Execute,
    settings: dict[str, Any],
) -> None:
    """A worker's life: claim, do, write, until nothing is left. When its parent is gone it stops."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then asks us to stop
    signal.signal(signal.SIGTERM, stop_now)
    store = Store(settings["folder"], beat=settings["beat"], stale=settings["stale"])
    board = Board(every, store, forgiven=forgiven)
    device = "cpu" if settings["gpu"] is None else "cuda"

    def watch(task: Task, record: dict[str, Any]) -> None:
        try:
            pipe.send((task.key, record))
        except OSError:
            raise SystemExit(1) from None

    last = ""

    def work(task: Task) -> bool:
        nonlocal last
        got = attend(task, store, watch, execute, device=device, shared=settings["shared"])
        last = task.candidate_key if got else last
        return got

    places = {task.key: (number / len(tasks) - settings["offset"]) % 1 for number, task in enumerate(tasks)}

    def order(ready: list[Task]) -> list[Task]:
        """The same candidate's next seed, for which code is compiled; then candidates that nobody is at."""
        others = {task.candidate_key for task in tasks if store.claimed(task)}
        return sorted(ready, key=lambda t: (t.candidate_key != last, t.candidate_key in others, places[t.key]))

    try:
        drain(board, tasks, work, wait=False, order=order)
    except DeviceSpoilt:
        raise SystemExit(SPOILT) from None


def stop_now(number: int, frame: Any) -> None:
    raise SystemExit(1)
