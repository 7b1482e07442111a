"""Building a model from a saved folder touches neither the network nor other files, whatever its config says.

Configs can name much that is fetched or read while a model is built: a backbone on the hub, a checkpoint by its path, a
folder with another config. Python tells an audit hook before a socket is connected, a file opened or a program started,
and the hook refuses that to a thread that is inside `enclosed`. What Python itself needs, code and packages' own data,
is let through.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from linvit.errors import LinvitError

CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll")
OF_PACKAGES = ("__pycache__", ".dist-info", ".egg-info")  # in the names of folders, wherever packages lie
SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr")
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile")
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


class Inside(threading.local):
    """What a thread that builds a model is building, and what it was refused first."""

    what = ""
    refused: str | None = None


INSIDE = Inside()


@contextmanager
def enclosed(what: str) -> Iterator[None]:
    """Build a model of this name without network and other files; what it reaches for is said in one line."""
    install()
    before = INSIDE.what
    INSIDE.what, INSIDE.refused = what, None
    try:
        yield
    except Exception:
        if INSIDE.refused is not None:  # whatever the libraries in between made of it
            raise LinvitError(INSIDE.refused) from None
        raise
    finally:
        INSIDE.what = before


@cache
def install() -> None:
    """Add the hook, once and for good: Python has no way to take it off."""
    sys.addaudithook(hear)


def hear(event: str, args: tuple[Any, ...]) -> None:
    if not INSIDE.what:
        return
    if event == "open" and not harmless(args[0]):
        refuse(f"the file {args[0]}")
    elif event in NETWORK:
        refuse("the network")
    elif event in PROGRAMS:
        refuse("another program")


def refuse(target: str) -> None:
    INSIDE.refused = (
        INSIDE.refused or f"{INSIDE.what} reaches for {target}: a saved model is built from its folder alone"
    )
    raise LinvitError(INSIDE.refused)


def harmless(path: Any) -> bool:
    """Whether a file is code, a package's own or the system's."""
    if not isinstance(path, str | bytes | os.PathLike):
        return True  # the number of a file that is open already
    name = os.path.abspath(os.fsdecode(path))
    return name.endswith(CODE) or any(part in name for part in OF_PACKAGES) or name.startswith(roots())


@cache
def roots() -> tuple[str, ...]:
    packages = (Path(torch.__file__).parents[1], Path(__file__).parents[1])
    return tuple(os.path.join(root, "") for root in (*SYSTEM, sys.prefix, sys.base_prefix, *packages))
