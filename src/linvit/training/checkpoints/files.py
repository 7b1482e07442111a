"""Checkpoints: one safetensors file each, with what is no tensor as JSON in its header. No pickle is written or read.

A name always stands for a whole checkpoint. The last two are kept, and the best weights. What was damaged or
belongs to another run is refused, and the one before it serves.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linvit.errors import LinvitError
from linvit.files import clear_temporary, temporary

FORMAT = 1
KEPT = 2
NAME = re.compile(r"step-(\d+)\.safetensors")
BEST = "best.safetensors"


class CheckpointFiles:
    """The checkpoints of one run. `fingerprint` tells whether a file belongs to it."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self.fingerprint = folder, fingerprint

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step and drop those before the last two."""
        path = self.folder / f"step-{step:08d}.safetensors"
        write(path, tensors, {**state, "step": step, "fingerprint": self.fingerprint})
        for old in self.files()[KEPT:]:
            old.unlink(missing_ok=True)
        clear_temporary(self.folder)
        return path

    def save_best(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        write(self.folder / BEST, tensors, {**state, "fingerprint": self.fingerprint})

    def files(self) -> list[Path]:
        """Checkpoints of steps, newest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)

    def latest(self, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
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

    def best(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The best weights."""
        return self.read(self.folder / BEST)

    def read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, state = read(path)
        if state.get("fingerprint") != self.fingerprint:
            raise LinvitError(f"{path} belongs to another run: its model, data or recipe differ")
        return tensors, state


def write(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint whole or not at all. Tensors that share memory are written one by one."""
    held, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        held[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    header = {"linvit": json.dumps({**state, "format": FORMAT, "checksum": checksum(held)})}
    try:
        with temporary(path) as beside:
            safetensors.torch.save_file(held, beside, header)
    except (OSError, SafetensorError) as error:
        raise LinvitError(f"cannot write the checkpoint {path}: {error}") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
    if state["checksum"] != checksum(tensors):
        raise LinvitError(f"the checkpoint {path} is damaged: its checksum is wrong")
    return tensors, state


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of all values, in the order of the names."""
    found = 0
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        found = zlib.crc32(values.flatten().view(torch.uint8).numpy().data, found)
    return found
