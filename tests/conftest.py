"""What holds for every test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

from linvit import clock

# Ctrl-C is what it is at a terminal: shells let jobs in the background ignore it, and tests are often run there.
signal.signal(signal.SIGINT, signal.default_int_handler)

HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """What a test's libraries leave behind (Ray ends the process on SIGTERM) does not reach the next test."""
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def short_timings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that time something want a number, not a good one."""
    if not request.node.get_closest_marker("gpu"):
        real = clock.by_turns
        short = lambda calls, device, *, budget=0.4, **options: real(calls, device, budget=budget / 10, **options)  # noqa: E731
        monkeypatch.setattr(clock, "by_turns", short)


def pytest_collection_finish() -> None:
    """What is imported stays and need not be looked through, and what compilers drop less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionfinish() -> None:
    gc.unfreeze()
