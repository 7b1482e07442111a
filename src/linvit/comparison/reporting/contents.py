"""All that a report says, whatever it is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linvit.comparison.reporting.answer import Answer, answer
from linvit.comparison.statistics.reading import Results, read
from linvit.comparison.statistics.rows import Setting, settings


@dataclass(frozen=True)
class Contents:
    results: Results
    settings: tuple[Setting, ...]
    answer: Answer


def gather(stores: Sequence[str | Path]) -> Contents:
    """Read the stores, folders or archives, and work out what they say."""
    results = read(stores)
    found = tuple(settings(results))
    return Contents(results, found, answer(found))
