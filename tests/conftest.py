"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

# Ctrl-C is what it is at a terminal: shells let jobs in the background ignore it, and tests are often run there.
signal.signal(signal.SIGINT, signal.default_int_handler)

HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """What a test's libraries leave behind (Ray ends the process on SIGTERM) does not reach the next test."""
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
