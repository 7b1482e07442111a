"""One thing to do: a teacher or a candidate to be trained, or a candidate to be timed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from shlex import quote

from linvit.codec import digest, to_plain
from linvit.comparison.description.identity import key_of
from linvit.comparison.results import Identity, Label, Structure


@dataclass(frozen=True)
class Task:
    """`identity` is everything that determines the result; `places` says where this machine has what the identity names
    by digest (data, root, teacher), and is no part of the key."""

    identity: Identity
    label: Label
    needs: tuple[str, ...] = ()  # keys of what must be finished first
    places: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """teacher, run or speed"""
        return self.identity.kind

    @cached_property
    def key(self) -> str:
        return key_of(self.identity)

    @cached_property
    def candidate_key(self) -> str:
        """What a candidate's runs and speeds have in common."""
        return digest({f.name: to_plain(getattr(self.identity, f.name)) for f in fields(Structure)})

    @cached_property
    def affinity(self) -> str:
        """The same for tasks that differ in their seed alone, and so can share a model and its compiled steps."""
        identity = to_plain(self.identity)
        config = {name: value for name, value in identity.get("config", {}).items() if name != "seed"}
        return digest({**identity, "config": config, "seed": None, "kind": None})

    @property
    def command(self) -> str:
        """What does it again from its result file alone."""
        told = {name: place for name, place in self.places.items() if (name, place) != ("data", "digits")}
        flags = "".join(f" --{name} {quote(place)}" for name, place in told.items())
        return f"linvit compare {self.key}.json -o again{flags}"
