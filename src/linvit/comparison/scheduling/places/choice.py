"""Where the work is done, by the engine's name or by what this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from linvit.comparison.scheduling.board import Summary
from linvit.comparison.scheduling.places.gpus import Gpus
from linvit.comparison.scheduling.places.here import Here
from linvit.comparison.scheduling.places.place import Place
from linvit.comparison.scheduling.scheduler import run
from linvit.errors import LinvitError, unknown

ENGINES = ("auto", "local", "gpus", "ray")


def choose(name: str, *, per_gpu: int = 1, address: str = "", cpus: int | None = None) -> Callable[..., Summary]:
    """What does tasks in a store: `(tasks, store, *, watch, retry)`. Auto is ray where an address is given, workers for
    several GPUs or runs at a time, else this process; also where `torchrun` started several, which then do
    each run together."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if address and name not in ("auto", "ray"):
        raise LinvitError(f"--address is that of a Ray cluster and does not go with --engine {name}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from linvit.comparison.scheduling.places import together

        return together.run
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
