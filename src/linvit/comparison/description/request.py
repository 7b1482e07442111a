"""From what a user asks for to tasks: a preset, a file, a result to repeat, or what the store was asked before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linvit.comparison.description.grid import LeftOut, from_result, in_order, survey
from linvit.comparison.description.identity import DataDescription, describe_data
from linvit.comparison.description.spec import PARTS, Comparison, load
from linvit.comparison.description.task import Task
from linvit.errors import LinvitError

PLACES = ("data", "root", "teacher")  # what may lie elsewhere on another machine


@dataclass
class Request:
    """The tasks of one command, what `all` left out, and what is known of the data, by digest."""

    tasks: list[Task] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    data: dict[str | None, DataDescription] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)


def read_request(
    source: str | Comparison, changes: dict[str, Any], asked: Sequence[Comparison] = (), *, guess: bool = False
) -> Request:
    """What is asked for: by a preset, a file or a comparison; without any, what the store was `asked` before. `changes`
    are fields that the command line sets. With `guess`, data need not be there."""
    if isinstance(source, str) and source.endswith(".json"):
        return repeat(Path(source), changes)
    request = Request(comparisons=comparisons_of(source, changes, asked))
    found: dict[str, Task] = {}
    for comparison in request.comparisons:
        facts = describe(comparison, guess)
        request.data[facts.digest] = facts
        tasks, left_out = survey(comparison, facts)
        found = {**{task.key: task for task in tasks}, **found}
        request.left_out += [row for row in left_out if row not in request.left_out]
    request.tasks = in_order(found.values())
    return request


def comparisons_of(source: str | Comparison, changes: dict[str, Any], asked: Sequence[Comparison]) -> list[Comparison]:
    """The named comparison; without a name, what the store was asked, else one made of the flags alone."""
    if source:
        return [changed(source if isinstance(source, Comparison) else load(source), changes)]
    if asked and not changes.keys() - set(PLACES):
        return [replace(comparison, **changes) for comparison in asked]
    if not changes:
        raise LinvitError("say what to compare: a preset (linvit compare digits -o STORE), a file, or flags")
    return [Comparison(**changes)]


def changed(comparison: Comparison, changes: dict[str, Any]) -> Comparison:
    """The comparison with what the command line says, in all its parts. Settings add to those of the file."""
    settings = (*comparison.settings, *changes.get("settings", ()))
    told = [name for name in PARTS if name in changes and name != "settings"]
    nothing: dict[str, Any] = dict.fromkeys(told)
    also = tuple(replace(part, **nothing) for part in comparison.also)
    return replace(comparison, **{**changes, "settings": settings, "also": also})


def describe(comparison: Comparison, guess: bool) -> DataDescription:
    try:
        return describe_data(comparison.data, comparison.root)
    except LinvitError:
        if not guess:
            raise
        return DataDescription(comparison.data, None, classes=1000, train=None, validation=None)


def repeat(path: Path, changes: dict[str, Any]) -> Request:
    """The task of a result file once more; of the rest only the places may differ."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LinvitError(f"cannot read {path}: {error}") from None
    beyond = sorted(changes.keys() - set(PLACES))
    if beyond:
        raise LinvitError(f"{path.name} says what is repeated: {', '.join(beyond)} cannot be changed")
    identity = result.get("identity") if isinstance(result, dict) else None
    if not isinstance(identity, dict):
        raise LinvitError(f"{path} is no result file of a comparison")
    name = (identity.get("data") or {}).get("name", "digits")
    tasks = from_result(result, {"data": name, **changes})
    if identity.get("kind") == "speed":
        return Request(tasks)
    facts = describe_data(changes.get("data", name), changes.get("root", ""))
    if facts.digest != identity["data"]["digest"]:
        raise LinvitError(f"{facts.name} is not the set of {path.name}: give --data {name}, the same one")
    return Request(tasks, data={facts.digest: facts})


def pick(tasks: Sequence[Task], keys: Sequence[str]) -> list[Task]:
    """Only the tasks whose keys begin so, and what they need."""
    if not keys:
        return list(tasks)
    for key in keys:
        if not any(task.key.startswith(key) for task in tasks):
            raise LinvitError(f"no task has the key {key}: --dry-run --json shows them all")
    chosen = [task for task in tasks if task.key.startswith(tuple(keys))]
    needed = {key for task in chosen for key in task.needs}
    return [task for task in tasks if task in chosen or task.key in needed]
