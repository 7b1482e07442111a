"""What a runtime says of itself: what to install, which precisions it has, and how a program becomes its file."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from linvit.errors import LinvitError


@dataclass(frozen=True)
class ExportJob:
    """A program to be written, the precision, and batches of one image each that int8 is calibrated on."""

    program: ExportedProgram
    path: Path
    precision: str
    calibration: list[np.ndarray] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Target:
    """A runtime. `write` makes its file and gives what there is to tell of it."""

    name: str
    title: str
    suffix: str
    packages: tuple[str, ...]
    write: Callable[[ExportJob], dict[str, Any]]
    refused: Mapping[str, str] = field(default_factory=dict)  # precisions, and "dynamic", with the reason
    runs_here: bool = True
    shows_layers: bool = True  # whether what layers give can be read from inside its files

    def check(self, precision: str, dynamic: bool) -> None:
        """Raise where this cannot be had, before any work is done."""
        asked = [precision, *(["dynamic"] if dynamic else [])]
        for what in asked:
            if what in self.refused:
                raise LinvitError(f"{self.title} cannot have {what}: {self.refused[what]}")
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise LinvitError(f"{self.title} needs {', '.join(missing)}: pip install 'linvit[{self.name}]'")


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Converters tell much of themselves, on every channel; errors still come through."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
