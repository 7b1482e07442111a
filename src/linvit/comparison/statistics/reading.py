"""The results of one or more stores, in folders or archives. What cannot be read is left out, and a note says so."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from linvit.comparison.results import VERSION, Failure, Run, Speed
from linvit.comparison.scheduling.travel import open_store, store_name
from linvit.errors import LinvitError


@dataclass
class Results:
    """All that was found; of failures the last one of each job that is not finished."""

    runs: list[Run] = field(default_factory=list)
    teachers: dict[str, Run] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)


def read(stores: Sequence[str | Path]) -> Results:
    """Everything in these stores. The same result in two of them counts once."""
    results = Results()
    seen: set[tuple[str, str, object]] = set()
    for path in map(Path, stores):
        store = open_store(path)
        results.stores.append(store_name(path))
        for result in store.results():
            apart = result.environment.hardware if isinstance(result, Speed) else getattr(result, "attempt", None)
            if (result.kind, result.key, apart) not in seen:
                seen.add((result.kind, result.key, apart))
                add(results, result)
        results.notes += [note.replace(f"{path}/", "") for note in store.notes]
    finished = {result.key for result in [*results.runs, *results.teachers.values(), *results.speeds]}
    last = {failure.key: failure for failure in sorted(results.failures, key=lambda failure: failure.attempt)}
    results.failures = [failure for key, failure in last.items() if key not in finished]
    if not results.runs and not results.speeds and not results.failures:
        raise LinvitError(f"nothing to report in {', '.join(map(str, stores))}: no result file was found")
    return results


def add(results: Results, result: Run | Speed | Failure) -> None:
    if isinstance(result, Failure):
        results.failures.append(result)
    elif result.version > VERSION:
        results.notes.append(f"{result.kind} {result.key} was left out: it is of version {result.version}.")
    elif isinstance(result, Speed):
        results.speeds.append(result)
    else:
        if result.by_image and result.right is None:
            note = f"Run {result.key}: the images' results do not fit its accuracy; only the total is used."
            results.notes.append(note)
        if result.kind == "teacher":
            results.teachers[result.key] = result
        else:
            results.runs.append(result)
