"""The one exception for a user's mistake: the command line prints its message as a single line."""

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

SHOWN = 9  # so many known names are listed, not more


class LinvitError(ValueError):
    """Something the user can put right; the message says how."""


class Unreadable(LinvitError):
    """Images that cannot be read, each by its file's name with the reason."""

    def __init__(self, *files: tuple[str, str], hint: str = "") -> None:
        super().__init__(files, hint)
        self.files, self.hint = files, hint

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        if len(self.files) == 1:
            return f"cannot read image {': '.join(self.files[0])}{hint}"
        lines = (f"{name}: {reason}" for name, reason in self.files)
        return "\n  ".join([f"cannot read {len(self.files):,} images{hint}:", *lines])

    def __reduce__(self) -> Any:
        return partial(type(self), hint=self.hint), self.files


class Unwritable(LinvitError):
    """A file that cannot be written: a full disk, mostly. Whatever is tried next will fail as well."""


class NotHonoured(LinvitError):
    """What an attention layer does and its new mechanism cannot: the `reason`, and the `features` to give up."""

    def __init__(self, reason: str, features: Sequence[str]) -> None:
        super().__init__(reason, features)
        self.reason, self.features = reason, tuple(features)

    def __str__(self) -> str:
        them = "it" if len(self.features) == 1 else "them"
        return f"{self.reason}; drop={self.features} gives {them} up{self.hint('local=5')}"

    def hint(self, option: str) -> str:
        """What takes the place of a relative bias, by the option that asks for it."""
        return f"; {option} then begins as the filter nearest to the bias" if "relative_bias" in self.features else ""


def reason(error: BaseException) -> str:
    """What an error of another library says, in its first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unknown(kind: str, name: str, known: Iterable[str], all_by: str = "") -> LinvitError:
    """The error for a name nobody registered, with the nearest ones that exist, and `all_by` which command one sees
    them all."""
    known = sorted(known)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    more = f", … and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known[:SHOWN])}{more}"
    return LinvitError(f"unknown {kind} '{name}'; {hint}" + (f" ({all_by} shows all)" if all_by else ""))


def unknown_model(kind: str, name: str, known: Iterable[str]) -> LinvitError:
    """The same for what may be a folder too: a path is no misspelt name."""
    if os.path.isfile(name):
        return LinvitError(f"{kind} '{name}' is a file: give the folder that linvit saved")
    if os.sep in name:
        return LinvitError(f"{kind} '{name}': there is no such folder")
    return unknown(kind, name, known)
