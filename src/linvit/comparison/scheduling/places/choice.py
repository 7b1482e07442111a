"""Where the work is done, by the engine's name or by what this machine has."""

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from linvit.comparison.description.job import Job
from linvit.comparison.scheduling.places.gpus import Gpus
from linvit.comparison.scheduling.places.place import Execute, Here, Place, Record, Send
from linvit.comparison.scheduling.scheduler import Board, Scheduler, Summary, Watch, run
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError, unknown
from linvit.training import Processes, close_process_group

ENGINES = ("auto", "local", "gpus", "ray")


def choose(name: str, *, per_gpu: int = 1, address: str = "", cpus: int | None = None) -> Callable[..., Summary]:
    """What does jobs in a store: `(jobs, store, *, watch, retry)`. Auto is ray where an address is given, workers for
    several GPUs or runs at a time, else this process; also where `torchrun` started several, which then do
    each run together."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if address and name not in ("auto", "ray"):
        raise LinvitError(f"--address is that of a Ray cluster and does not go with --engine {name}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return run_together
    place: Place
    if name == "ray" or address:
        from linvit.comparison.scheduling.places.ray import RayCluster

        place = RayCluster(address=address or "auto", per_gpu=per_gpu, cpus=cpus)
    elif cpus is not None:
        raise LinvitError("--cpus is what a run reserves of a Ray cluster: use --engine ray with it")
    elif name == "gpus" or (name == "auto" and (per_gpu > 1 or torch.cuda.device_count() > 1)):
        place = Gpus(per_gpu=per_gpu)
    elif per_gpu > 1:
        raise LinvitError("--per-gpu is for workers: use --engine gpus or ray with it")
    else:
        place = Here()
    return partial(run, place=place)


class Together(Here):
    """Processes that `torchrun` started, as one place: each run is done by all of them, for runs that are too large for
    one GPU. The first process schedules and the others follow it. Speeds are not timed: a plain `linvit compare` on the
    same store does that. What others work on is left to them. An error ends the process, and with it the others, which
    would wait for ever."""

    patient = False
    slots = ()

    def __init__(self, execute: Execute | None = None) -> None:
        super().__init__(execute)
        self.processes = Processes()
        self.device = self.processes.device.type
        self.tell = self.processes.broadcast_object  # what the first process says, in every process

    def do(self, job: Job, shared: int, watch: Send) -> Record:
        self.tell(job.key)
        ended = super().do(job, shared, watch)
        if "result" in ended:
            self.processes.wait()  # nobody needs the work folder any more
        return ended

    def check(self, job: Job, ended: Record) -> None:
        if "failure" in ended:
            raise LinvitError(f"{job.label.candidate} failed, and with it all processes: {ended['failure'].error}")

    def follow(self, board: Board) -> None:
        """Do what the first process says, for as long as it says something."""
        while (key := self.tell(None)) is not None:
            self.execute(board.by_key[key], self.store, device=self.device, shared=1, watch=lambda record: None)
            self.processes.wait()


def run_together(
    jobs: Sequence[Job], store: Store, *, watch: Watch, retry: bool = False, execute: Execute | None = None
) -> Summary:
    """Do the runs one after another, all processes at each."""
    place = Together(execute)
    board = Board([job for job in jobs if job.kind != "speed"], store, retry=retry)
    with place.opened(store, board.jobs):
        if place.processes.first:
            Scheduler(board, place, watch).run()
            place.tell(None)
        else:
            place.follow(board)
    place.processes.wait()
    summary = board.summary()
    close_process_group()
    return summary
