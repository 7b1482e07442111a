"""The state of a run: what is in its checkpoints, the best weights, and in the end the models."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.conversion.rebuilding import layers_of, origin
from linvit.conversion.saving import save
from linvit.errors import LinvitError
from linvit.training.callbacks.callback import Callback
from linvit.training.checkpoints.files import CheckpointFiles
from linvit.training.config import FREE, Config
from linvit.training.processes import Processes

Restored = tuple[dict[str, Tensor], dict[str, Any]]


class RunState:
    """Gathers a run's state and puts it back. Every process reads; only the first one writes. `identity` says what the
    run is beside its config and model, so that no other run goes on with its checkpoints."""

    def __init__(
        self,
        processes: Processes,
        config: Config,
        model: nn.Module,
        callbacks: Sequence[Callback],
        folder: Path | None,
        identity: Mapping[str, Any],
        models: bool,
    ) -> None:
        self.processes, self.model, self.callbacks = processes, model, callbacks
        self.folder, self.seconds = folder, config.checkpoint_seconds
        if folder is not None and models:
            origin(model)  # whether it can be saved: better known now than in the end
        for name in ("checkpoints", "last", "best"):
            if folder is not None and (folder / name).is_file():
                raise LinvitError(f"{folder / name} is a file where a folder must be: move it, or give another folder")
        mark = fingerprint(config, model, identity)
        self.files = CheckpointFiles(folder / "checkpoints", mark) if folder is not None else None
        self.best: Restored | None = None
        self.best_is_new = False
        self.saved = time.perf_counter()

    @property
    def shown(self) -> nn.Module:
        """The model that is evaluated and saved: the moving average where there is one."""
        return next((callback.shown for callback in self.callbacks if callback.shown is not None), self.model)

    @property
    def begun(self) -> bool:
        """Whether there are checkpoints to go on from."""
        return self.files is not None and bool(self.files.files())

    def due(self) -> bool:
        return self.files is not None and time.perf_counter() - self.saved >= self.seconds

    def save(self, step: int, optimiser: torch.optim.Optimizer, bad: Tensor, known: Mapping[str, Any]) -> None:
        """Write a checkpoint with what else is known, unless the loss or the weights are not finite any more: then the
        last good one stays the last."""
        if self.files is None or not self.processes.first or bad.item() or not all_finite(self.model):
            return
        if self.best is not None and self.best_is_new:
            self.files.save_best(*self.best)
            self.best_is_new = False
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        values: dict[str, Any] = {}
        scaler = self.processes.scaler
        state: dict[str, Any] = {
            "scaler": scaler.state_dict() if scaler is not None else None,
            "best": self.best[1] if self.best is not None else None,
            "processes": self.processes.world,
            **known,
        }
        for index, moments in optimiser.state_dict()["state"].items():
            for key, value in moments.items():
                (tensors if isinstance(value, Tensor) else values)[f"optimiser.{index}.{key}"] = value
        for callback in self.callbacks:
            tensors |= callback.tensors()
            state |= callback.state()
        self.files.save(step, tensors, {**state, "optimiser": values})
        self.saved = time.perf_counter()

    def restore(self, warn: Callable[[str], None]) -> Restored | None:
        """Put the newest usable checkpoint back, and give it for what the optimiser still needs."""
        found = self.files.latest(warn) if self.files is not None else None
        if found is None or self.files is None:
            return None
        tensors, state = found
        own = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(own)
        for callback in self.callbacks:
            callback.restore(tensors, state)
        if self.processes.scaler is not None and state["scaler"]:
            self.processes.scaler.load_state_dict(state["scaler"])
        if state["best"] is not None:
            try:
                self.best = (self.files.best()[0], state["best"])
            except LinvitError as mistake:
                warn(f"the best weights are lost, and the best is looked for again from here: {mistake}")
        if state["processes"] != self.processes.world:
            warn(f"begun with {state['processes']} processes, not {self.processes.world}: weights may differ")
        return found

    def offer(self, step: int, score: float, metrics: Mapping[str, float]) -> None:
        """Keep the shown weights if they are the best so far; a larger score is better."""
        if self.best is None or score > self.best[1]["score"]:
            held = {name: tensor.detach().clone() for name, tensor in self.shown.state_dict().items()}
            self.best = (held, {"step": step, "score": score, "metrics": dict(metrics)})
            self.best_is_new = True

    def save_models(self) -> None:
        """Write the models that `linvit.load` reads: `last`, and `best` where there was an evaluation."""
        if self.folder is None or not self.processes.first:
            return
        save(self.shown, self.folder / "last")
        if self.best is not None:
            last = {name: tensor.detach().clone() for name, tensor in self.shown.state_dict().items()}
            self.shown.load_state_dict(self.best[0])
            save(self.shown, self.folder / "best")
            self.shown.load_state_dict(last)


def restore_optimiser(optimiser: torch.optim.Optimizer, found: Restored) -> None:
    """Put an optimiser's state back as it is in a checkpoint."""
    packed: dict[int, dict[str, Any]] = {}
    moved = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for name, value in {**found[0], **found[1]["optimiser"]}.items():
        kind, _, place = name.partition(".")
        if kind == "optimiser":
            index, _, key = place.partition(".")
            like = moved[int(index)]
            if isinstance(value, Tensor) and value.shape == like.shape:  # fused steps walk both as they lie
                value = torch.empty_like(like, dtype=value.dtype).copy_(value)
            packed.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({"state": packed, "param_groups": optimiser.state_dict()["param_groups"]})


def fingerprint(config: Config, model: nn.Module, identity: Mapping[str, Any]) -> str:
    """A hash of what a run is and of the shapes it trains."""
    settings = {key: value for key, value in config.to_dict().items() if key not in FREE}
    what = {"config": settings, "layers": layers_of(model), **identity}
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in model.state_dict().items()}
    text = json.dumps([what, shapes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def all_finite(model: nn.Module) -> bool:
    """Whether all weights are finite. Waits for the device."""
    held = [parameter.detach() for parameter in model.parameters()]
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in held]).all()) if held else True
