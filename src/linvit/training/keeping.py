"""What a run keeps: checkpoints to go on from, the best weights, and in the end the models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from linvit.conversion.rebuilding import origin
from linvit.conversion.saving import save
from linvit.errors import LinvitError
from linvit.training.average import Average
from linvit.training.checkpoints import Checkpoints, pack_optimiser, unpack_optimiser

Restored = tuple[dict[str, Tensor], dict[str, Any]]


class Keeper:
    """Gathers a run's state and puts it back. Every process reads; only the first one writes."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path | None,
        fingerprint: str,
        model: nn.Module,
        average: Average | None,
        seconds: float,
        models: bool = True,
    ) -> None:
        self.accelerator, self.model, self.average = accelerator, model, average
        self.folder, self.seconds = folder, seconds
        if folder is not None and models:
            origin(model)  # whether it can be saved: better known now than in the end
        for name in ("checkpoints", "last", "best"):
            if folder is not None and (folder / name).is_file():
                raise LinvitError(f"{folder / name} is a file where a folder must be: move it, or give another folder")
        self.checkpoints = Checkpoints(folder / "checkpoints", fingerprint) if folder else None
        self.best: Restored | None = None
        self.best_is_new = False
        self.saved = time.perf_counter()

    @property
    def shown(self) -> nn.Module:
        """The model that is evaluated and saved: the moving average where there is one."""
        return self.model if self.average is None else self.average.model

    def due(self) -> bool:
        return self.checkpoints is not None and time.perf_counter() - self.saved >= self.seconds

    def save(self, step: int, optimiser: Any, bad: Tensor, known: Mapping[str, Any]) -> None:
        """Write a checkpoint with what else is known, unless the loss has become no number, or the weights have: then
        the last good one stays the last."""
        if self.checkpoints is None or not self.accelerator.is_main_process:
            return
        if bad.item() or not all_finite(self.model):
            return
        if self.best is not None and self.best_is_new:
            self.checkpoints.save_best(*self.best)
            self.best_is_new = False
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.model.state_dict().items()}
        moments, rest = pack_optimiser(optimiser.state_dict())
        scaler = self.accelerator.scaler
        state = {
            "optimiser": rest,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "best": self.best[1] if self.best is not None else None,
            "processes": self.accelerator.num_processes,
            **known,
        }
        self.checkpoints.save(step, {**tensors, **moments}, state)
        self.saved = time.perf_counter()

    def restore(self, warn: Callable[[str], None]) -> tuple[int, Restored] | None:
        """Put the newest usable checkpoint back: its step, and what the optimiser still needs."""
        found = self.checkpoints.latest(warn) if self.checkpoints else None
        if found is None or self.checkpoints is None:
            return None
        tensors, state = found
        self.model.load_state_dict(part(tensors, "model"))
        if self.average is not None:
            self.average.model.load_state_dict(part(tensors, "average"))
        if self.accelerator.scaler is not None and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if state["best"] is not None:
            try:
                self.best = (self.checkpoints.best()[0], state["best"])
            except LinvitError as mistake:
                warn(f"the best weights are lost, and the best is looked for again from here: {mistake}")
        if state["processes"] != self.accelerator.num_processes:
            warn(f"begun with {state['processes']} processes, not {self.accelerator.num_processes}: weights may differ")
        return state["step"], found

    def restore_optimiser(self, optimiser: torch.optim.Optimizer, found: Restored) -> None:
        tensors, state = found
        packed = unpack_optimiser(tensors, state["optimiser"])
        moved = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        for index, values in packed.items():
            like = moved[index]
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == like.shape:  # fused steps walk both as they lie
                    values[key] = torch.empty_like(like, dtype=value.dtype).copy_(value)
        optimiser.load_state_dict({"state": packed, "param_groups": optimiser.state_dict()["param_groups"]})

    def offer(self, step: int, score: float, metrics: Mapping[str, float]) -> None:
        """Keep the shown weights if they are the best so far."""
        if self.best is None or score > self.best[1]["score"]:
            held = {name: tensor.detach().clone() for name, tensor in self.shown.state_dict().items()}
            self.best = (held, {"step": step, "score": score, "metrics": dict(metrics)})
            self.best_is_new = True

    def finish(self) -> None:
        """Write the models that `linvit.load` reads: `last`, and `best` where there was an evaluation."""
        if self.folder is None or not self.accelerator.is_main_process:
            return
        save(self.shown, self.folder / "last")
        if self.best is not None:
            last = {name: tensor.detach().clone() for name, tensor in self.shown.state_dict().items()}
            self.shown.load_state_dict(self.best[0])
            save(self.shown, self.folder / "best")
            self.shown.load_state_dict(last)


def part(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors under a name."""
    return {name.removeprefix(f"{kind}."): t for name, t in tensors.items() if name.startswith(f"{kind}.")}


def all_finite(model: nn.Module) -> bool:
    """Whether all weights are numbers. Waits for the device."""
    held = [parameter.detach() for parameter in model.parameters()]
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in held]).all()) if held else True
