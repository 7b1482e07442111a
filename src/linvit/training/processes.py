"""One process or many, through accelerate: where the run is, and what the processes tell each other.

Gradients are averaged in one piece after the backward pass. A wrapper around the model would do it during the pass, but
it wants to see the model called as a whole, and alignment calls its layers one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from linvit.errors import LinvitError
from linvit.training.config import Config
from linvit.training.repeating import prepare


def make_accelerator(config: Config, device: str = "auto") -> Accelerator:
    """Accelerate's handle, for `accelerate launch`, `torchrun` or a plain process. `device` is auto, cpu or cuda."""
    if device not in ("auto", "cpu", "cuda"):
        raise LinvitError(f"device {device}: give auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise LinvitError("PyTorch sees no CUDA device here: give --device cpu")
    if config.precision == "fp16" and (device == "cpu" or not torch.cuda.is_available()):
        raise LinvitError("precision=fp16 needs a GPU: set precision=bf16 or fp32")
    if config.deterministic:
        prepare()
    without = device == "auto" and not torch.accelerator.is_available()
    AcceleratorState._reset_state()  # else a second run in this process could not have another precision
    accelerator = Accelerator(
        cpu=device == "cpu" or without,  # said, for else processes that torchrun started would not find each other
        mixed_precision="no" if config.precision == "fp32" else config.precision,
        gradient_accumulation_steps=config.accumulate,
    )
    if config.batch_size % (accelerator.num_processes * config.accumulate):
        raise LinvitError(
            f"batch_size={config.batch_size} cannot be split over {accelerator.num_processes} processes "
            f"and {config.accumulate} accumulated parts: set another"
        )
    return accelerator


def average_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter], extra: Tensor) -> Tensor:
    """Give every process the mean gradient, and the mean of `extra`, a scalar that travels along."""
    if accelerator.num_processes == 1:
        return extra
    gradients = [p.grad for p in parameters if p.grad is not None]
    pieces = [*gradients, extra.to(gradients[0].dtype)]
    flat = accelerator.reduce(torch.cat([piece.flatten() for piece in pieces]), reduction="mean")
    parts = flat.split([piece.numel() for piece in pieces])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts[:-1], gradients, strict=True)])
    return parts[-1].reshape(()).to(extra.dtype)


def share_from_first(accelerator: Accelerator, tensors: Iterable[Tensor]) -> None:
    """Give every process what the first one has."""
    if accelerator.num_processes > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor.data, 0)


def part() -> None:
    """Part company, where there is any, when the last run is done. Left to the interpreter's end, the threads of the
    process group now and then abort the process."""
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
