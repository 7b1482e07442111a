"""Where a picture may be written. Asked before the work, so that nobody waits for a file that cannot be saved."""

from __future__ import annotations

from pathlib import Path

from linvit.errors import LinvitError, unknown

FORMATS = (".pdf", ".png", ".svg")


def check_picture(path: Path) -> None:
    """Raise unless `path` is a picture's name in a folder that exists."""
    if path.suffix.lower() not in FORMATS:
        raise unknown("picture format", path.suffix or path.name, FORMATS)
    if not path.parent.is_dir():
        raise LinvitError(f"no folder {path.parent} to put {path.name} in; make it first")
