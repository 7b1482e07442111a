"""Ctrl-C, SIGTERM and SIGHUP: a run that is told to stop keeps what it has.

A signal in the middle of a step waits for the step's end, for weights that are half moved are worth nothing; one during
an evaluation ends that at once, and the resumed run evaluates anew. Then a checkpoint is written. A second Ctrl-C does
not wait. Handlers that a program has set itself are left to it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A run ended because this signal told it to."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Stop:
    """Whether a signal has told this run to stop."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.at_once = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        again = self.asked is not None and number == signal.SIGINT
        self.asked = number
        if self.at_once or again:
            raise Stopped(number)

    @contextmanager
    def heard(self, wanted: bool) -> Iterator[None]:
        """Inside, signals are heard, where nobody else does: Python hands them to the main thread alone."""
        held = {}
        if wanted and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    held[number] = signal.signal(number, self.hear)
        try:
            yield
        finally:
            for number, before in held.items():
                signal.signal(number, before)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, where nothing is lost by it, a signal ends the work at once."""
        if self.asked is not None:
            raise Stopped(self.asked)
        self.at_once = True
        try:
            yield
        finally:
            self.at_once = False
