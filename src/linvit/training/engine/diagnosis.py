"""Where a NaN began: the batch is run again with an eye on every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linvit.errors import LinvitError
from linvit.training.contract import Batch, Objective, images_of, tensors_of


class Diverged(LinvitError):
    """The loss is NaN or infinite. The message says where it began and what to go back to."""


def find_bad_layer(model: nn.Module, objective: Objective, batch: Batch) -> str | None:
    """The first place, in words, where this batch meets something that is not finite; None where there is none."""
    if not all(map(finite, tensors_of(batch))):
        return "the batch itself"
    for name, tensor in model.named_parameters():
        if not finite(tensor):
            return f"the weights, beginning with {name}"
    found: list[str] = []
    for module in model.modules():  # a bad batch has spoilt its statistics, which training does not read
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not all(map(finite, module.buffers())):
            module.reset_running_stats()
    for name, buffer in model.named_buffers():
        if not finite(buffer):
            return f"the weights, beginning with {name}"

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not found and not all(finite(tensor) for tensor in tensors_of(out)):
                found.append(f"the activations of {name} ({type(module).__name__})")

        return hook

    if objective.teacher is not None and not finite(objective.teacher(images_of(batch)[0])):
        return "the teacher's answers"
    handles = [module.register_forward_hook(look(name or "the model")) for name, module in model.named_modules()]
    try:
        loss = objective(model, batch)["loss"]
        if found:
            return found[0]
        if not finite(loss):
            return "the loss itself, while every layer's activations are finite"
        model.zero_grad()
        loss.backward()
        wrong = [name for name, p in model.named_parameters() if p.grad is not None and not finite(p.grad)]
        return f"the gradient of {wrong[-1]}" if wrong else None
    finally:
        model.zero_grad()
        for handle in handles:
            handle.remove()


def finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True
