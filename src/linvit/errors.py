"""The one exception for a user's mistake: the command line prints its message as a single line."""

from collections.abc import Iterable
from difflib import get_close_matches


class LinvitError(ValueError):
    """Something the user can put right; the message says how."""


def unknown(kind: str, name: str, known: Iterable[str]) -> LinvitError:
    """The error for a name nobody registered, with the nearest ones that exist."""
    known = sorted(known)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
    return LinvitError(f"unknown {kind} '{name}'; {hint}")
