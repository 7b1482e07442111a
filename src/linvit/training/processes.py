"""One process or many: where a run is, and what its processes tell each other.

`torchrun` (and `accelerate launch`) start several and say in the environment which is which. They talk through gloo on
the CPU and NCCL on CUDA. Gradients are averaged by DistributedDataParallel during the backward pass (engine/step.py);
the rest, which is little, goes through here.
"""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from linvit.errors import LinvitError
from linvit.training.config import Config

LOWERED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Processes:
    """This process among those of a run: its device, rank and precision. `device` is auto, cpu or cuda."""

    def __init__(self, device: str = "auto", precision: str = "fp32") -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise LinvitError(f"device {device}: give auto, cpu or cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise LinvitError("PyTorch sees no CUDA device here: give --device cpu")
        if precision == "fp16" and (device == "cpu" or not torch.cuda.is_available()):
            raise LinvitError("precision=fp16 needs a GPU: set precision=bf16 or fp32")
        found = torch.accelerator.current_accelerator(check_available=True) if device == "auto" else None
        kind = found.type if found is not None else device.replace("auto", "cpu")
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.first = self.rank == 0  # whether this is the process that writes files and talks to the user
        self.device = torch.device(kind)
        if self.world > 1:
            if kind == "cuda":
                self.device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
                torch.cuda.set_device(self.device)
            if not dist.is_initialized():
                dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        self.precision = LOWERED.get(precision)
        self.scaler = torch.amp.GradScaler(kind) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute in the run's precision inside."""
        return nullcontext() if self.precision is None else torch.autocast(self.device.type, dtype=self.precision)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes."""
        if self.world == 1:
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor / self.world

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every process what the first one has."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, 0)

    def broadcast_object(self, value: Any) -> Any:
        """What the first process has."""
        return self.gather_objects(value)[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """What each process has, in their order."""
        held = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(held, value)
        return held

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.world > 1:
            dist.barrier()


def make_processes(config: Config, device: str = "auto") -> Processes:
    """The processes of a run by this config."""
    if config.deterministic:  # cuBLAS reads it when it starts, so it is set before the first use of a device
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    processes = Processes(device, config.precision)
    if config.batch_size % (processes.world * config.accumulate):
        raise LinvitError(
            f"batch_size={config.batch_size} cannot be split over {processes.world} processes "
            f"and {config.accumulate} accumulated parts: set another"
        )
    return processes


def close_process_group() -> None:
    """End the talk between processes, if there is any, when the last run is done. Left to the interpreter's end, the
    threads of the process group now and then abort the process."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
