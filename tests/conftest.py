"""What holds for every test."""

from __future__ import annotations

import signal

# Ctrl-C is what it is at a terminal: shells let jobs in the background ignore it, and tests are often run there.
signal.signal(signal.SIGINT, signal.default_int_handler)
