"""Half precision: computed in float32, returned as it came, and autocast kept outside."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def lift(x: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def lower(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The result in its dtype. What is beyond float16's range becomes its largest number: an infinity would turn all
    that follows into NaN."""
    if dtype == torch.float16:
        x = x.clamp(-65504.0, 65504.0)
    return x.to(dtype)


# Asked once, because the compiler of torch 2.11 cannot look into the question and would break the graph at it.
AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind))


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast does not reach inside: sums over tokens overflow in half precision."""
    if device.type in AUTOCAST and (torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type)):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
