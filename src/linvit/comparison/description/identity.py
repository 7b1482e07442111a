"""What determines a result, and the key that is made of it.

A key is the same in every process, on every machine and under every Python: canonical JSON, SHA-256, 16 hex digits. The
version of linvit is not in it; result files note that instead. Where data and teacher lie is not in it either, their
digests are. Of the recipe only what differs from the defaults counts, so that a new field, switched off, keeps the keys
of old results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linvit.codec import digest, simple, to_plain
from linvit.comparison.results import DataSet, GivenTeacher, Identity
from linvit.conversion.saving import CONFIG, WEIGHTS, SavedConfig, read_config
from linvit.errors import LinvitError
from linvit.files import sha256
from linvit.tasks.classify.data import Digits, Images, open_data
from linvit.training.config import FREE, RETIRED, Config

SIZED = 10_000  # so many images' file sizes go into a set's digest; the names of all do
DEFAULTS = to_plain(Config())


def key_of(identity: Identity | Mapping[str, Any]) -> str:
    """The key of a task's identity."""
    counted = to_plain(identity)
    if "config" in counted:
        counted["config"] = counted_config(counted["config"])
    for name in ("data", "teacher"):
        counted[name] = essence(counted[name]) if name in counted else None
    return digest({name: value for name, value in counted.items() if value is not None})


def counted_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a recipe what counts: what is not free to differ, not the default, and not about a mean that is not taken."""
    idle = {*FREE, *RETIRED} if config.get("ema") else {*FREE, *RETIRED, "ema_ramp"}
    return {
        name: value
        for name, value in config.items()
        if name not in idle and (name not in DEFAULTS or simple(value) != simple(DEFAULTS[name]))
    }


def essence(named: Mapping[str, Any] | None) -> Any:
    """Of a set or a teacher its key or digest; the name only where there is neither."""
    return named and (named.get("key") or named.get("digest") or named.get("name"))


@dataclass(frozen=True)
class DataDescription(DataSet):
    """A set by its name and digest, and how many classes and images it has; None where only reading it would tell."""

    classes: int
    train: int | None
    validation: int | None


def describe_data(data: str, root: str = "") -> DataDescription:
    train, validation = open_data(data, root=root or None)
    known = isinstance(train, Images)
    return DataDescription(
        name=Path(data).name if Path(root or ".", data).exists() else data,
        digest=digest([split_digest(train), split_digest(validation)]) if known else None,
        classes=train.class_count or 1000,
        train=len(train) if known else None,
        validation=len(validation) if known else None,
    )


def split_digest(split: Images) -> str:
    """A fingerprint of a split: the pixels of the digits; of others names, labels and file sizes, never the content."""
    source, labels = split.source, split.labels
    found = hashlib.sha256(f"{len(split)} {list(split.classes)}".encode())
    if labels is not None:
        found.update(np.asarray(labels, dtype="<i8").tobytes())
    if isinstance(source, Digits):
        found.update(source.pixels.tobytes())
    elif hasattr(source, "samples"):
        names = [source.filename(i) for i in range(len(source))]
        found.update("\n".join(names).encode())
        every = range(0, len(names), max(1, len(names) // SIZED))
        found.update(" ".join(str(file_size(split, i)) for i in every).encode())
    return found.hexdigest()[:16]


def file_size(split: Images, index: int) -> int:
    places = getattr(split.source, "places", None)
    return places[index][1] if places is not None else Path(split.filename(index)).stat().st_size


def describe_teacher(teacher: str) -> tuple[GivenTeacher, SavedConfig | None]:
    """A teacher from elsewhere, and for a folder that linvit saved its config."""
    folder = Path(teacher)
    if not folder.is_dir():
        return GivenTeacher(teacher, None), None
    config = read_config(folder)
    if any(layer.mechanism != "softmax" for layer in config.layers):
        raise LinvitError(f"the teacher {folder} is converted already: give the softmax model it was made from")
    found = hashlib.sha256((folder / CONFIG).read_bytes())
    try:
        found.update(sha256(folder / WEIGHTS))
    except OSError as error:
        raise LinvitError(f"cannot read the teacher's weights: {error}") from None
    return GivenTeacher(folder.name, found.hexdigest()[:16]), config
