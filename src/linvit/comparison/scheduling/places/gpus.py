"""The GPUs of this machine as a place: a worker process for each, or several that share one.

Without a GPU the workers share the CPU. Speeds are timed by one worker alone, on the first GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from linvit.comparison.description.job import Job
from linvit.comparison.scheduling.places.place import Execute, Hear, Place, TimingSlot, attempt
from linvit.comparison.scheduling.store import Store
from linvit.training.engine.stopping import Stopped

TICK = 0.5  # seconds to wait for word from a worker
PATIENCE = 15.0  # seconds for a worker to stop when asked to
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus(Place):
    def __init__(self, execute: Execute | None = None, *, per_gpu: int = 1) -> None:
        super().__init__(execute)
        self.shared = per_gpu
        count, named = torch.cuda.device_count(), os.environ.get(VISIBLE)
        names = [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]
        self.gpus: list[str | None] = [*names] or [None]  # by the names that CUDA_VISIBLE_DEVICES takes
        # Forks of a process that has imported torch start faster, but must not meet CUDA.
        self.context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        if not torch.cuda.is_available():
            self.context.set_forkserver_preload([__name__])
        self.workers: list[WorkerProcess] = []

    @contextmanager
    def opened(self, store: Store, jobs: Sequence[Job]) -> Iterator[None]:
        self.store = store
        try:
            yield
        finally:
            self.stop(self.workers)

    def capacity(self) -> int:
        return len(self.gpus) * self.shared

    def hire(self, job: Job, slot: TimingSlot | None) -> WorkerProcess:
        taken = Counter(worker.gpu for worker in self.workers)
        gpu = self.gpus[0] if slot else min(self.gpus, key=lambda gpu: taken[gpu])
        self.workers.append(WorkerProcess(gpu, self.context, self.execute, str(self.store.folder)))
        return self.workers[-1]

    def send(self, worker: WorkerProcess, job: Job, name: str, *, shared: int) -> None:
        worker.name, worker.begun = name, False
        with suppress(OSError):  # dead: its end is heard when it is polled
            worker.pipe.send((job, shared))

    def poll(self, hear: Hear) -> None:
        pipes = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(pipes), timeout=TICK):
            worker = pipes[cast(Connection, pipe)]
            try:
                record = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join()
                text = f"it ended with code {worker.process.exitcode} (killed, or out of memory?)"
                record = {"kind": "lost", "text": text, "begun": worker.begun, "spoilt": True}
                self.workers.remove(worker)
            worker.begun = True
            hear(worker.name, record)

    def dismiss(self, worker: WorkerProcess, *, kill: bool = False) -> None:
        if worker in self.workers:
            self.stop([worker])

    def stop(self, workers: Sequence[WorkerProcess]) -> None:
        """Ask workers to stop, and see to it that they do."""
        for worker in workers:
            worker.process.terminate()
        until = time.monotonic() + PATIENCE
        for worker in workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self.workers = [worker for worker in self.workers if worker not in workers]


class WorkerProcess:
    """A worker process as its parent sees it, and the name of what it is at."""

    def __init__(self, gpu: str | None, context: Any, execute: Execute, folder: str) -> None:
        self.gpu, self.name, self.begun = gpu, "", False
        self.pipe, theirs = context.Pipe()
        device = "cpu" if gpu is None else "cuda"
        self.process = context.Process(target=serve, args=(theirs, execute, folder, device))
        before, os.environ[VISIBLE] = os.environ.get(VISIBLE), gpu or ""  # it sees this GPU alone
        try:
            self.process.start()
        finally:
            del os.environ[VISIBLE]
            os.environ.update({} if before is None else {VISIBLE: before})
        theirs.close()


def serve(pipe: Connection, execute: Execute, folder: str, device: str) -> None:
    """A worker's life: one job after another, for as long as its parent lives. Told to stop, a training writes its
    checkpoint first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then stops us
    threading.Thread(target=end_with_parent, daemon=True, name="parent").start()
    store = Store(folder)
    with suppress(EOFError, OSError, Stopped):
        while True:
            job, shared = pipe.recv()
            pipe.send(attempt(job, store, execute, device=device, shared=shared, watch=pipe.send))


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
