"""The same bits twice: what PyTorch must be told for a resumed run to equal one that was never killed.

On a GPU, several backward passes add in whatever order their threads arrive, and the compiler picks kernels by racing
them. Both are switched off for the time of a run. Softmax attention is a case of its own: its backward pass keeps an
order only where PyTorch may fail and not just warn, and cuDNN's is left out of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config as inductor


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Softmax attention by PyTorch's other kernels inside.

    cuDNN's has no deterministic backward pass; and on Hopper, with 64 keys modulo 128, its gradients are NaN
    once a query's logits are all below −88 or so (pytorch/pytorch#196678).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms inside; where PyTorch has none for an operation, it warns."""
    if not wanted:
        yield
        return
    held = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # a guard for debugging, and slow
    try:
        with without_cudnn_attention(), inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(held[0], warn_only=held[1])
        settings.fill_uninitialized_memory = fill


@contextmanager
def strictly(wanted: bool) -> Iterator[None]:
    """Inside `repeatable`: operations without a deterministic algorithm fail, and attention takes the one it has."""
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted:
            torch.use_deterministic_algorithms(True, warn_only=True)
