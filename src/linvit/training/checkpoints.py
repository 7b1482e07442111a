"""Checkpoints: one safetensors file each, with what is no tensor as JSON in its header. No pickle is written or read.

A name always stands for a whole checkpoint. The last two are kept, and the best weights. What was damaged or
belongs to another run is refused, and the one before it serves.
"""

import copy
import hashlib
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from linvit.conversion.rebuilding import layers_of, origin
from linvit.conversion.saving import save
from linvit.errors import LinvitError, Unwritable
from linvit.files import clear_temporary, temporary
from linvit.training.callbacks import Callback, under
from linvit.training.config import FREE, Config
from linvit.training.logs import Watch
from linvit.training.processes import Processes

FORMAT = 2  # 1 had a checksum of the tensors alone
KEPT = 2
NAME = re.compile(r"step-(\d+)\.safetensors")
BEST = "best.safetensors"
Restored = tuple[dict[str, Tensor], dict[str, Any]]  # a checkpoint's tensors, and its state


@dataclass(frozen=True)
class Output:
    """Where a run goes. In its `folder` it is logged, kept in checkpoints and ends in the models `last` and `best`,
    unless `models` says that nobody wants these. `watch` hears every record of the log. `identity` says what else the
    run is, its data and teacher say, so that no other run goes on with its checkpoints."""

    folder: Path | None = None
    watch: Watch | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    models: bool = True


@dataclass
class CheckpointFiles:
    """The checkpoints of one run. `fingerprint` tells whether a file belongs to it."""

    folder: Path
    fingerprint: str

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step and drop those before the last two."""
        self.write(f"step-{step:08d}.safetensors", tensors, {**state, "step": step})
        for old in self.files()[KEPT:]:
            old.unlink(missing_ok=True)

    def write(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        write(self.folder / name, tensors, {**state, "fingerprint": self.fingerprint})

    def files(self) -> list[Path]:
        """Checkpoints of steps, newest first."""
        return sorted((path for path in self.folder.glob("*") if NAME.fullmatch(path.name)), reverse=True)

    def latest(self, warn: Callable[[str], None]) -> Restored | None:
        """The newest usable checkpoint; None where there is none yet. Each refused one is told about."""
        reason = None
        for path in self.files():
            try:
                return self.read(path)
            except LinvitError as mistake:
                reason = reason or mistake
                warn(f"{mistake}; trying the one before")
        if reason is not None:
            raise LinvitError(f"no checkpoint can be used: {reason}; start the run in another folder")
        return None

    def read(self, path: Path) -> Restored:
        tensors, state = read(path)
        if state.get("fingerprint") != self.fingerprint:
            raise LinvitError(f"{path} belongs to another run: its model, data or recipe differ")
        return tensors, state


def resumes_after(folder: Path) -> int | None:
    """The step after which the run in this folder goes on; None where it has no checkpoint."""
    found = CheckpointFiles(folder / "checkpoints", "").files()
    return int(found[0].stem.removeprefix("step-")) if found else None


def write(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}  # none share
    known = {**state, "format": FORMAT, "checksum": checksum(held)}
    header = {"linvit": json.dumps({**known, "digest": digest(known, held)})}
    try:
        with temporary(path) as beside:
            safetensors.torch.save_file(held, beside, header)
    except (Unwritable, SafetensorError) as error:  # of a full disk the second
        raise Unwritable(f"cannot write the checkpoint {path}: {error}") from error


def read(path: Path) -> Restored:
    """A checkpoint's tensors and state, or one line that says what is wrong with it."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get("linvit")
        tensors = safetensors.torch.load_file(path)
        state = json.loads(header) if header else None
    except (OSError, SafetensorError, ValueError) as error:
        raise LinvitError(f"the checkpoint {path} is damaged: {error}") from None
    if not isinstance(state, dict) or "checksum" not in state or not isinstance(state.get("format"), int):
        raise LinvitError(f"{path} is no checkpoint of linvit")
    if state["format"] > FORMAT:
        raise LinvitError(f"{path} has format {state['format']}, this linvit reads up to {FORMAT}: upgrade")
    wrong = state["format"] > 1 and state.pop("digest", None) != digest(state, tensors)
    if wrong or state["checksum"] != checksum(tensors):
        raise LinvitError(f"the checkpoint {path} is damaged: its checksum is wrong")
    return tensors, state


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of all values, in the order of the names."""
    found = 0
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        found = zlib.crc32(values.flatten().view(torch.uint8).numpy().data, found)
    return found


def digest(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the state, and of the tensors' names and shapes."""
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    plain = json.loads(json.dumps(state))  # as it is read: names are words
    return hashlib.sha256(json.dumps([plain, shapes], sort_keys=True).encode()).hexdigest()


class RunState:
    """Gathers a run's state, for checkpoints and in the end the models, and puts it back. Every process reads; only the
    first one writes."""

    def __init__(
        self, processes: Processes, config: Config, model: nn.Module, callbacks: Sequence[Callback], output: Output
    ) -> None:
        self.processes, self.model, self.callbacks = processes, model, callbacks
        folder = self.folder = output.folder
        self.seconds = config.checkpoint_seconds
        if folder is not None and output.models:
            origin(model)  # whether it can be saved: better known now than in the end
        inside = [folder / name for name in ("checkpoints", "last", "best")] if folder is not None else []
        for path in inside:
            if path.is_file():
                raise LinvitError(f"{path} is a file where a folder must be: move it, or give another folder")
        clear_temporary(*inside, *([folder] if folder is not None else []))
        mark = fingerprint(config, model, output.identity)
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
            self.files.write(BEST, *self.best)
            self.best_is_new = False
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        values: dict[str, Any] = {}
        scaler = self.processes.scaler
        state: dict[str, Any] = {"scaler": scaler.state_dict() if scaler is not None else None, **known}
        state |= {"best": self.best[1] if self.best is not None else None, "processes": self.processes.world}
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
        self.model.load_state_dict(under("model.", tensors))
        for callback in self.callbacks:
            callback.restore(tensors, state)
        if self.processes.scaler is not None and state["scaler"]:
            self.processes.scaler.load_state_dict(state["scaler"])
        if state["best"] is not None:
            try:
                self.best = (self.files.read(self.files.folder / BEST)[0], state["best"])
            except LinvitError as mistake:
                warn(f"the best weights are lost, and the best is looked for again from here: {mistake}")
        if state["processes"] != self.processes.world:
            warn(f"begun with {state['processes']} processes, not {self.processes.world}: weights may differ")
        return found

    def offer(self, step: int, score: float, metrics: Mapping[str, float]) -> None:
        """Keep the shown weights if they are the best so far; a larger score is better."""
        if self.best is None or score > self.best[1]["score"]:
            known = {"step": step, "score": score, "metrics": dict(metrics)}
            self.best = (copy.deepcopy(self.shown.state_dict()), known)
            self.best_is_new = True

    def save_models(self) -> None:
        """Write the models that `linvit.load` reads: `last`, and `best` where there was an evaluation."""
        if self.folder is None or not self.processes.first:
            return
        save(self.shown, self.folder / "last")
        if self.best is not None:
            last = copy.deepcopy(self.shown.state_dict())
            self.shown.load_state_dict(self.best[0])
            save(self.shown, self.folder / "best")
            self.shown.load_state_dict(last)


def restore_optimiser(optimiser: torch.optim.Optimizer, found: Restored) -> None:
    """Put an optimiser's state back as it is in a checkpoint."""
    packed: dict[int, dict[str, Any]] = {}
    moved = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for name, value in under("optimiser.", {**found[0], **found[1]["optimiser"]}).items():
        index, _, key = name.partition(".")
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
    finite = [torch.isfinite(parameter.detach()).all() for parameter in model.parameters()]
    return not finite or bool(torch.stack(finite).all())
