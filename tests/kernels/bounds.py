"""In Triton's interpreter every address that a kernel reads or writes must lie in a tensor that it was given.

On a GPU one that does not is found only where nothing else lies, and then it ends the process. So does a launch that
was compiled for tensors of other types, or for one that is not there: there it is compiled once, here never.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

from linvit.kernels.fused import Launch


class Watched:
    """The interpreter's memory, which serves the tensors of the launch that runs."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.starts = self.ends = np.zeros(0, np.uint64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def give(self, tensors: tuple[Tensor | None, ...]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        places = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
        self.starts, self.ends = np.array(places, np.uint64).T

    def check(self, places: Any, mask: Any, size: int) -> None:
        used = places[mask]
        if used.size:
            of = np.searchsorted(self.starts, used, "right").astype(np.int64) - 1
            assert (of >= 0).all() and (used + np.uint64(size) <= self.ends[of]).all(), "outside of all tensors"

    def load(self, places: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check(places, mask, np.dtype(dtype).itemsize)
        return self.memory.load(places, mask, other, dtype)

    def store(self, places: Any, value: Any, mask: Any) -> Any:
        self.check(places, mask, value.dtype.itemsize)
        return self.memory.store(places, value, mask)


@contextmanager
def checked() -> Iterator[None]:
    """Launches inside read and write nothing but what they are given, and are given tensors of one kind."""
    memory, launch = Watched(interpreter._interpreter), Launch.__call__

    def run(self: Launch, *tensors: Tensor | None) -> None:
        kinds = [None if tensor is None else tensor.dtype for tensor in tensors]
        assert vars(self).setdefault("kinds", kinds) == kinds, "compiled for tensors of another kind"
        memory.give(tensors)
        launch(self, *tensors)

    with mock.patch.object(interpreter, "_interpreter", memory), mock.patch.object(Launch, "__call__", run):
        yield
