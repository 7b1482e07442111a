"""All that a report says, whatever it is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linvit.comparison.report.answer import Answer, answer
from linvit.comparison.report.reading import Results, read
from linvit.comparison.report.rows import Setting, settings


@dataclass(frozen=True)
class Contents:
    results: Results
    settings: tuple[Setting, ...]
    answer: Answer


def gather(stores: Sequence[Path]) -> Contents:
    """Read the stores and work out what they say."""
    results = read(stores)
    found = tuple(settings(results))
    return Contents(results, found, answer(found))
