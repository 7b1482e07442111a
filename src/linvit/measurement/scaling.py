"""`bench scaling`: is a mechanism that calls itself linear really linear? Time it at N and at 2N tokens on the CPU."""

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch

from linvit.attention import TokenGrid, create_attention, list_mechanisms, mechanism_class
from linvit.measurement.speed import OpShape

LIMIT = 2.6  # twice the work, and room for caches that no longer hold it and for clocks that jitter
HEADS, HEAD_DIM = 2, 16


def linear_mechanisms() -> list[tuple[str, str]]:
    """Every mechanism and variant whose capabilities say it is linear."""
    every = [(name, variant) for name in list_mechanisms() for variant in mechanism_class(name).variants or ("",)]
    return [each for each in every if _create(*each, TokenGrid(4, 4)).capabilities.linear]


def _create(name: str, variant: str, grid: TokenGrid) -> Any:
    options: dict[str, Any] = {"variant": variant} if variant else {}
    return create_attention(name, heads=HEADS, head_dim=HEAD_DIM, dim=HEADS * HEAD_DIM, grid=grid, **options).eval()


def scaling(name: str, variant: str, tokens: int, *, repeats: int = 9, rounds: int = 3) -> dict[str, Any]:
    """Median times at both sizes, on one thread and by that thread's own clock: others may be busy on the machine.

    A ratio over the limit is measured again with twice the calls, at most `rounds` times: noise goes away, N² does not.
    """
    keep_pages()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for attempt in range(rounds):
            calls = [_call(name, variant, tokens), _call(name, variant, 2 * tokens)]
            samples = [[_once(call) for call in calls] for _ in range(repeats * 2**attempt)]
            single, double = (median(column) for column in zip(*samples, strict=True))
            if double / single < LIMIT:
                break
    finally:
        torch.set_num_threads(threads)
    found = {"mechanism": name, "variant": variant, "tokens": [tokens, 2 * tokens], "ms": [single, double]}
    return {**found, "ratio": double / single, "limit": LIMIT, "linear": double / single < LIMIT}


def _call(name: str, variant: str, tokens: int) -> Callable[[], object]:
    grid = OpShape(1, HEADS, HEAD_DIM, tokens).grid
    mechanism = _create(name, variant, grid)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, tokens, HEAD_DIM, generator=generator)
    x = torch.randn(1, tokens, HEADS * HEAD_DIM, generator=generator)
    call = torch.inference_mode()(partial(mechanism, q, k, v, grid, x=x if mechanism.capabilities.input else None))
    call()
    return call


def keep_pages() -> None:
    """Ask glibc to keep freed memory, where it is the C library.

    It gives large blocks back to the system at once, and getting them again, page by page, takes longer than the
    arithmetic on them. Where it starts to do so depends on what was allocated before, so 2N tokens could pay for it and
    N tokens not.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, at its largest
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _once(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin) * 1e3
