"""Which engine does the work, by its name or by what this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from linvit.comparison.engines import Summary
from linvit.errors import LinvitError, unknown

ENGINES = ("auto", "local", "gpus", "ray")


def choose(name: str, *, per_gpu: int = 1, address: str = "", cpus: int | None = None) -> Callable[..., Summary]:
    """The engine's `run`. Auto is ray where an address is given, workers for several GPUs or runs at a time, else this
    process; also where `torchrun` started several, which then do each run together."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if address and name not in ("auto", "ray"):
        raise LinvitError(f"--address is that of a Ray cluster and does not go with --engine {name}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from linvit.comparison.engines import together

        return together.run
    if name == "ray" or address:
        from linvit.comparison.engines import ray

        return partial(ray.run, address=address or "auto", per_gpu=per_gpu, cpus=cpus)
    if cpus is not None:
        raise LinvitError("--cpus is what a run reserves of a Ray cluster: use --engine ray with it")
    if name == "gpus" or (name == "auto" and (per_gpu > 1 or torch.cuda.device_count() > 1)):
        from linvit.comparison.engines import gpus

        return partial(gpus.run, per_gpu=per_gpu)
    if per_gpu > 1:
        raise LinvitError("--per-gpu is for workers: use --engine gpus or ray with it")
    from linvit.comparison.engines import local

    return local.run
