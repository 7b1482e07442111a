"""One thing to do, what determines its result, and the key that is made of that.

A key is the same in every process, on every machine and under every Python: canonical JSON, SHA-256, 16 hex digits. The
version of linvit is not in it; result files note that instead. Where data and teacher lie is not in it either, their
digests are. Of the recipe only what differs from the defaults counts, so that a new field, switched off, keeps the keys
of old results.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from linvit.codec import digest, simple, to_plain
from linvit.comparison.results import Identity, Label, Named, Structure, TrainedTeacher, TrainingIdentity
from linvit.conversion.saving import CONFIG, WEIGHTS, SavedConfig, read_config
from linvit.errors import LinvitError
from linvit.files import sha256
from linvit.tasks.classify.data import Images, open_data
from linvit.tasks.digests import split_digest
from linvit.training.config import FREE, RETIRED, Config

DEFAULTS = to_plain(Config())


@dataclass(frozen=True)
class Job:
    """A teacher or a candidate to be trained, or a candidate to be timed. `identity` is everything that determines the
    result; `places` says where this machine has what the identity names by digest (data, root, teacher), and is no part
    of the key."""

    identity: Identity
    label: Label
    places: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """teacher, run or speed"""
        return self.identity.kind

    @property
    def training(self) -> TrainingIdentity:
        """The identity of a run or a teacher."""
        assert isinstance(self.identity, TrainingIdentity)
        return self.identity

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys of what must be finished first: of the teacher, where that is trained too."""
        teacher = None if self.kind == "speed" else self.training.teacher
        return (teacher.key,) if isinstance(teacher, TrainedTeacher) else ()

    @cached_property
    def key(self) -> str:
        return key_of(self.identity)

    @cached_property
    def candidate_key(self) -> str:
        """What a candidate's runs and speeds have in common."""
        return digest({f.name: to_plain(getattr(self.identity, f.name)) for f in fields(Structure)})

    @cached_property
    def affinity(self) -> str:
        """The same for jobs that differ in their seed alone, and so can share a model and its compiled steps."""
        identity = to_plain(self.identity)
        config = {name: value for name, value in identity.get("config", {}).items() if name != "seed"}
        return digest({**identity, "config": config, "seed": None, "kind": None})

    @property
    def command(self) -> str:
        """What does it again from its result file alone."""
        told = {name: place for name, place in self.places.items() if (name, place) != ("data", "digits")}
        flags = "".join(f" --{name} {quote(place)}" for name, place in told.items())
        return f"linvit compare {self.key}.json -o again{flags}"


def key_of(identity: Identity | Mapping[str, Any]) -> str:
    """The key of a job's identity: of a set or a teacher its key or digest, the name only where there is neither."""
    counted = to_plain(identity)
    if "config" in counted:
        counted["config"] = counted_config(counted["config"])
    for name in ("data", "teacher"):
        named = counted.get(name)
        counted[name] = named and (named.get("key") or named.get("digest") or named.get("name"))
    return digest({name: value for name, value in counted.items() if value is not None})


def counted_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a recipe what counts: what is not free to differ, not the default, and not about a mean that is not taken."""
    idle = {*FREE, *RETIRED} if config.get("ema") else {*FREE, *RETIRED, "ema_ramp"}
    return {
        name: value
        for name, value in config.items()
        if name not in idle and (name not in DEFAULTS or simple(value) != simple(DEFAULTS[name]))
    }


@dataclass(frozen=True)
class DataDescription(Named):
    """A set by its name and digest, and how many classes and images it has; None where only reading it would tell."""

    classes: int
    train: int | None
    validation: int | None


def describe_data(data: str, root: str = "", *, unlabelled: bool = False) -> DataDescription:
    """A set of images; one without labels, where that will do, has no classes."""
    train, validation = open_data(data, root=root or None, unlabelled=unlabelled)
    if not train.labelled:
        key = digest([split_digest(train), split_digest(validation)])
        return DataDescription(Path(data).name, key, 0, len(train), len(validation))
    name, classes = Path(data).name if Path(root or ".", data).exists() else data, train.class_count or 1000
    if not isinstance(train, Images):
        return DataDescription(name, None, classes, None, None)
    key = digest([split_digest(train), split_digest(validation)])
    return DataDescription(name, key, classes, len(train), len(validation))


def describe_teacher(teacher: str) -> tuple[Named, SavedConfig | None]:
    """A teacher from elsewhere, and for a folder that linvit saved its config."""
    return describe_folder(teacher, "teacher") if Path(teacher).is_dir() else (Named(teacher, None), None)


def describe_folder(path: str, what: str) -> tuple[Named, SavedConfig]:
    """A softmax model that linvit saved, by the digest of its config and weights, and its config."""
    folder = Path(path)
    config = read_config(folder)
    if any(layer.mechanism != "softmax" for layer in config.layers):
        raise LinvitError(f"the {what} {folder} is converted already: give the softmax model it was made from")
    found = hashlib.sha256((folder / CONFIG).read_bytes())
    try:
        found.update(sha256(folder / WEIGHTS))
    except OSError as error:
        raise LinvitError(f"cannot read the {what}'s weights: {error}") from None
    return Named(folder.name, found.hexdigest()[:16]), config
