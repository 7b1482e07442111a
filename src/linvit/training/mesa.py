"""MESA, as EfficientViT trains its large models: from some step on, the model also learns what the moving average of
its own weights says. The papers' formula is `ratio · BCE(model, sigmoid(average))`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.training.contract import Objective
from linvit.training.losses import logits_of


class Mesa:
    """An objective around another; `active` is off until its time comes."""

    def __init__(self, objective: Objective, model: nn.Module, average: nn.Module, ratio: float) -> None:
        self.objective, self.average, self.ratio = objective, average, ratio
        self.active = False
        self.output: Tensor | None = None
        self.hook = model.register_forward_hook(self.see)

    def see(self, model: nn.Module, args: Any, out: Any) -> None:
        """Keep the model's output, so that it need not run twice."""
        out = getattr(out, "logits", out)
        self.output = out[0] if isinstance(out, tuple | list) else out

    def rest(self) -> None:
        """Listen no more."""
        self.hook.remove()
        self.output = None

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        entries = self.objective(model, images, targets)
        if not self.active or self.output is None:
            return {**entries, "mesa": entries["loss"].detach() * 0}
        with torch.no_grad():
            wanted = logits_of(self.average(images)).sigmoid()
        mesa = F.binary_cross_entropy_with_logits(self.output, wanted)
        return {**entries, "loss": entries["loss"] + self.ratio * mesa, "mesa": mesa.detach()}
