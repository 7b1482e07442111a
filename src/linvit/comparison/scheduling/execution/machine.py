"""Who has a device of this machine: trainings have it together, a timing wants it alone.

Two comparisons at once would time each other: what takes 1.5 ms alone takes 6 beside another. So all processes of
linvit on a machine share a few locks. Timings take turns. A training that begins meanwhile waits for the one under way,
a minute at most. A timing does not wait for trainings, which take hours: it is marked.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from linvit.errors import LinvitError
from linvit.files import locked


@contextmanager
def training_on(device: torch.device) -> Iterator[None]:
    """Have a device together with other trainings, and the processors, which read the images."""
    with ExitStack() as stack:
        for name in dict.fromkeys(("cpu", name_of(device))):
            stack.enter_context(locked(lock_of(name), shared=True))
        yield


@contextmanager
def timing_on(device: torch.device) -> Iterator[bool]:
    """Have a device without other timings; whether it is without trainings, too."""
    name = name_of(device)
    with ExitStack() as stack:
        stack.enter_context(locked(lock_of(f"{name}-timing")))
        try:
            stack.enter_context(locked(lock_of(name), wait=0, busy=f"{name} is trained on"))
        except LinvitError:
            yield False
        else:
            yield True


def name_of(device: torch.device) -> str:
    """What a device is called in every process of this machine."""
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type


def lock_of(name: str) -> Path:
    """A file that every user of this machine can lock."""
    path = Path(tempfile.gettempdir(), f"linvit-{name}.lock")
    with suppress(OSError):  # there is one, of somebody else perhaps
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR))
        path.chmod(0o666)
    return path
