"""Checkpoints: one safetensors file each, with what is no tensor as JSON in its header. No pickle is written or read.

A file is written beside its place, flushed and renamed, so a name always stands for a whole checkpoint. The last two
are kept, and the best weights. What was damaged or belongs to another run is refused, and the one before it serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linvit.errors import LinvitError
from linvit.files import sync

FORMAT = 1
KEPT = 2
NAME = re.compile(r"step-(\d+)\.safetensors")
BEST = "best.safetensors"


class Checkpoints:
    """The checkpoints of one run. `fingerprint` tells whether a file belongs to it."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self.fingerprint = folder, fingerprint

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step and drop those before the last two."""
        path = self.folder / f"step-{step:08d}.safetensors"
        write(path, tensors, {**state, "step": step, "fingerprint": self.fingerprint})
        for old in (*self.files()[KEPT:], *self.folder.glob(".writing-*")):  # the latter a killed process left
            old.unlink(missing_ok=True)
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


def fingerprint(what: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A hash of what a run is and of the shapes it trains."""
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    text = json.dumps([what, shapes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint whole or not at all. Tensors that share memory are written one by one."""
    held, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        held[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    header = {"linvit": json.dumps({**state, "format": FORMAT, "checksum": checksum(held)})}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    os.close(handle)
    try:
        safetensors.torch.save_file(held, temporary, header)
        sync(Path(temporary))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise LinvitError(f"cannot write the checkpoint {path}: {error}") from error
        raise


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


def pack_optimiser(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as named tensors and JSON."""
    tensors, rest = {}, {}
    for index, values in state["state"].items():
        for key, value in values.items():
            name = f"optimiser.{index}.{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                rest[name] = value
    return tensors, rest


def unpack_optimiser(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What `pack_optimiser` packed, by the parameter's index."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **rest}.items():
        kind, _, place = name.partition(".")
        if kind == "optimiser":
            index, _, key = place.partition(".")
            state.setdefault(int(index), {})[key] = value
    return state
