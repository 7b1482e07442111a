"""What a place where jobs run must be able to do, for the scheduler; how a job is done anywhere; and the simplest
place, this process."""

import gc
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from linvit.comparison.description.job import Job
from linvit.comparison.results import Run, Speed
from linvit.comparison.scheduling.store import ClaimLost, Store, hardware_for
from linvit.errors import LinvitError, reason
from linvit.files import is_full

Record = dict[str, Any]
Send = Callable[[Record], None]
Hear = Callable[[str, Record], None]
Execute = Callable[..., Run | Speed]  # what carries out a job: `execution.running.execute`, or a test's


class TimingSlot:
    """Where speeds are timed, one at a time, with nothing beside them: this machine, unless a place has others."""

    def hardware(self, job: Job) -> str:
        """What its results name as their hardware."""
        return hardware_for(job)


class Place(ABC):
    """Workers come and go by `hire` and `dismiss`. `send` gives a worker a job under a name, and `poll` waits a moment
    and tells what is new under these names: records of its progress, and in the end one of these.

        {"kind": "result", "result": …}
        {"kind": "failure", "failure": …, "spoilt": whether its worker is of no more use}
        {"kind": "lost", "text": why, "begun": whether the job had been begun, "spoilt": True}
        {"kind": "stopped", "text": why nothing can be written any more}
    """

    shared = 1  # runs that have a device together
    patient = True  # whether to wait for what others work on
    slots: Sequence[TimingSlot] = (TimingSlot(),)

    def __init__(self, execute: Execute | None = None) -> None:
        self.execute = execute or real_execute

    @contextmanager
    def opened(self, store: Store, jobs: Sequence[Job]) -> Iterator[None]:
        """Get ready for these jobs, and part from everything at the end."""
        self.store = store
        yield

    def timing_slots(self) -> Sequence[TimingSlot]:
        return self.slots

    def hardware(self, job: Job) -> list[str]:
        """The kinds of hardware that a speed is to be timed on here."""
        return list(dict.fromkeys(slot.hardware(job) for slot in self.timing_slots()))

    @abstractmethod
    def capacity(self) -> int:
        """How many workers for runs fit in, as it is now."""

    @abstractmethod
    def hire(self, job: Job, slot: TimingSlot | None) -> Any:
        """A new worker for jobs like this one: for runs, or on a slot."""

    @abstractmethod
    def send(self, worker: Any, job: Job, name: str, *, shared: int) -> None: ...

    @abstractmethod
    def poll(self, hear: Hear) -> None: ...

    @abstractmethod
    def dismiss(self, worker: Any, *, kill: bool = False) -> None:
        """Let a worker go; one that is at a job, or of no more use, is killed."""


class Here(Place):
    """This process: one job after another, each done while it is polled."""

    device = "auto"
    next: tuple[Job, str, int] | None = None

    def capacity(self) -> int:
        return 1

    def hire(self, job: Job, slot: TimingSlot | None) -> None:
        return None

    def send(self, worker: None, job: Job, name: str, *, shared: int) -> None:
        self.next = job, name, shared

    def poll(self, hear: Hear) -> None:
        assert self.next is not None
        (job, name, shared), self.next = self.next, None
        ended = self.do(job, shared, lambda record: hear(name, record))
        hear(name, ended)
        self.check(job, ended)

    def check(self, job: Job, ended: Record) -> None:
        """Whether this process can go on after a job."""
        if ended.get("spoilt"):
            who = job.label.candidate
            raise LinvitError(f"{who} left the GPU unusable ({ended['spoilt']}): start the command again to go on")

    def do(self, job: Job, shared: int, watch: Send) -> Record:
        return attempt(job, self.store, self.execute, device=self.device, shared=shared, watch=watch)

    def dismiss(self, worker: None, *, kill: bool = False) -> None:
        self.next = None


def attempt(job: Job, store: Store, execute: Execute, *, device: str, shared: int, watch: Send) -> Record:
    """Do a job; the record of how it ended."""
    try:
        watch({"kind": "start", "pid": os.getpid(), "node": platform.node()})
        return {"kind": "result", "result": execute(job, store, device=device, shared=shared, watch=watch)}
    except ClaimLost:
        raise
    except (Exception, SystemExit) as error:
        if is_full(error):
            return {"kind": "stopped", "text": reason(error)}
        failure = store.failure(job, error)
    return {"kind": "failure", "failure": failure, "spoilt": clean_up()}


def clean_up() -> str:
    """Give back what a failed job held on the device; what is wrong with that, if it no longer works, as after an
    illegal access: then everything else in this process would fail too."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return str(error).strip().splitlines()[0]
    return ""


def real_execute(job: Job, store: Store, **options: Any) -> Run | Speed:
    """What `running.execute` does; that imports the whole training, and is not needed to look at a store."""
    from linvit.comparison.scheduling.execution.running import execute

    return execute(job, store, **options)
