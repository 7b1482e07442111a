"""Mechanisms of other packages: found by their entry points, or named by the user.

They are imported when the registry is first asked, not with linvit: such a package imports linvit itself.
"""

import os
import sys
import warnings
from importlib import import_module
from importlib.metadata import entry_points

from linvit.errors import LinvitError, reason

GROUP = "linvit.mechanisms"
VARIABLE = "LINVIT_MODULES"  # names of modules, with commas; an environment variable, so that subprocesses see it too


def import_plugins() -> None:
    """Import what installed packages offer and what the environment variable names, also from the current folder."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # one broken package must not take the others along
            told = f"{point.value}, a mechanism of an installed package, cannot be imported: {reason(error)}"
            warnings.warn(told, stacklevel=2)
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if named and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in named:
        try:
            import_module(name)
        except LinvitError:
            raise
        except Exception as error:
            raise LinvitError(
                f"the module {name}, which --import or {VARIABLE} names, cannot be imported: {reason(error)}"
            ) from error
