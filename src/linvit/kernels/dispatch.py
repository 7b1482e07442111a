"""Which tensors the Triton kernels can serve. Nothing here needs Triton or a GPU to be imported."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def no_kernels_on(device: torch.device) -> str | None:
    """Why no Triton kernel can run on this device, or None where they can."""
    return _no_kernels_on(device)


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU: for tests, by TRITON_INTERPRET=1."""
    from triton.runtime.interpreter import InterpretedFunction

    from linvit.kernels import linear_kernels

    return isinstance(linear_kernels.add_partials, InterpretedFunction)


@lru_cache(maxsize=64)
def _no_kernels_on(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and interpreted():
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the tensors are on {'an AMD GPU' if device.type == 'cuda' else device.type}, not on an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a program can have, on a GPU."""
    return _shared_memory(device)


@lru_cache(maxsize=64)
def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def unserved(*tensors: Tensor) -> str | None:
    """Why the kernels cannot serve tensors on this device or of these types, or None where they can."""
    first = tensors[0]
    why = no_kernels_on(first.device)
    if why is not None:
        return why
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype:
            return f"the tensors have different types, {first.dtype} and {tensor.dtype}"
        if tensor.device != first.device:
            return f"the tensors are on different devices, {first.device} and {tensor.device}"
    if first.dtype not in DTYPES:
        return f"the tensors are {first.dtype}, not float32, float16 or bfloat16"
    return None
