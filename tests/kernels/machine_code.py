"""What a kernel becomes on a GPU of compute capability 9.0, without having one: compiled, disassembled and read.

There the products of matrices run beside the other instructions. One that takes its left operand from registers goes on
reading them after it was started, until the program waits for it; whoever writes to these registers before that, spoils
the product, now and then, when the chip is busy. Neither Triton nor its assembler rules this out.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from linvit.kernels import angular as angular_launch
from linvit.kernels import linear as linear_launch
from linvit.kernels import local as local_launch
from linvit.kernels import mobile as mobile_launch
from linvit.kernels import norm_gelu as norm_gelu_launch
from linvit.kernels import relu_quadratic as relu_quadratic_launch
from linvit.kernels import xca as xca_launch
from linvit.kernels.fused import MEMORY, Launch, signature_of, unpack
from linvit.kernels.linear import Formula
from linvit.kernels.mobile import Options

PROCESSORS = 132
DISASSEMBLER = Path(triton.__path__[0], "backends", "nvidia", "bin", "nvdisasm")
LAUNCHERS = (linear_launch, local_launch, mobile_launch, norm_gelu_launch, relu_quadratic_launch, xca_launch)


class Chip:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 1000 + self.capability  # what is compiled for it is kept apart from what real devices run

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Recorder:
    """The launches that would have happened, each kind once."""

    calls: dict[Any, tuple[Launch, tuple[Tensor | None, ...]]] = field(default_factory=dict)

    def note(self, launch: Launch, *tensors: Tensor | None) -> None:
        assert max(launch.grid[1:]) < 2**16
        kinds = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        self.calls[launch.kernel, launch.values, tuple(launch.options.items()), kinds] = (launch, tensors)


@contextmanager
def recorded(memory: int = MEMORY) -> Iterator[Recorder]:
    """Launches inside are planned for a large chip with so much shared memory, noted, and not done."""
    made = Recorder()
    caches = (linear_launch.prepare, relu_quadratic_launch.prepare, local_launch.prepare, xca_launch.prepare)
    caches += (norm_gelu_launch.prepare_moments, norm_gelu_launch.prepare_add, norm_gelu_launch.prepare_gradient)
    for cache in (*caches, angular_launch.prepare, mobile_launch.prepare_forward, mobile_launch.prepare_backward):
        cache.cache_clear()
    with ExitStack() as patches:
        for module in (angular_launch, linear_launch, relu_quadratic_launch, xca_launch):
            patches.enter_context(mock.patch.object(module, "shared_memory", lambda device: memory))
        for module in LAUNCHERS:
            patches.enter_context(mock.patch.object(module, "processors", lambda device: PROCESSORS))
        patches.enter_context(mock.patch.object(Launch, "__call__", lambda launch, *given: made.note(launch, *given)))
        yield made


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rows(dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int) -> list[Tensor]:
    """q, k, v and their gradients, heads inside tokens."""
    return [meta(dtype, batch, tokens, heads, dim).transpose(1, 2) for _ in range(6)]


def linear(
    formula: Formula, dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int, memory: int = MEMORY,
    taps: int = 0,
) -> Recorder:  # fmt: skip
    """What linear attention launches, forward and backward; with a filter of so many taps along the tokens."""
    q, k, v, dq, dk, dv = rows(dtype, batch, heads, tokens, dim)
    turn = [meta(torch.float32, tokens, dim) if formula.turn else None for _ in range(2)]
    weight = meta(torch.float32, 1, heads, 1, taps, 1) if taps else None
    formula = formula._replace(height=tokens, width=1) if taps else formula
    given = (None, *turn, meta(torch.float32) if formula.squared else None, weight, None)
    with recorded(memory) as found:
        out, state = linear_launch.forward(q, k, v, given, formula, True, signature_of(q, k, v))
        wanted = (given[3] is not None, taps > 0, False)
        linear_launch.backward(torch.empty_like(out), q, k, v, dq, dk, dv, given, [state], formula, wanted)
    return found


def relu_quadratic(
    dtype: torch.dtype,
    batch: int,
    heads: int,
    tokens: int,
    dim: int,
    *,
    biased: bool = False,
    packed: bool = False,
    memory: int = MEMORY,
) -> Recorder:
    q, k, v, dq, dk, dv = (meta(dtype, batch, heads, tokens, dim) for _ in range(6))
    if packed:
        (q, k, v), (dq, dk, dv) = (unpack(meta(dtype, batch, tokens, 3, heads, dim)) for _ in range(2))
    bias = meta(dtype, 1, heads, tokens, tokens) if biased else None
    with recorded(memory) as found:
        options = relu_quadratic_launch.Options()
        (out,) = relu_quadratic_launch.forward(q, k, v, (None, bias), options, True, signature_of(q, k, v))
        relu_quadratic_launch.backward(torch.empty_like(out), q, k, v, dq, dk, dv, (None, bias), [], options, (biased,))
    return found


def angular(
    dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int, *, masked: bool = False, memory: int = MEMORY
) -> Recorder:
    (q, k, v), (dq, dk, dv) = (unpack(meta(dtype, batch, tokens, 3, heads, dim)) for _ in range(2))
    given, options = (meta(torch.bool, batch, tokens) if masked else None,), angular_launch.Options(1e-6)
    with recorded(memory) as found:
        out, *saved = angular_launch.forward(q, k, v, given, options, True, signature_of(q, k, v))
        angular_launch.backward(torch.empty_like(out), q, k, v, dq, dk, dv, given, [out, *saved], options, ())
    return found


def mobile(dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int, small: int) -> Recorder:
    q, k, v, dq, dk, dv = rows(dtype, batch, heads, tokens, dim)
    options = Options(small, False, 1e-6)
    with recorded() as found:
        out, *saved = mobile_launch.forward(q, k, v, (None,), options, True, signature_of(q, k, v))
        mobile_launch.backward(torch.empty_like(out), q, k, v, dq, dk, dv, (None,), saved, options, ())
    return found


def xca(dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int, memory: int = MEMORY) -> Recorder:
    (q, k, v), (dq, dk, dv) = (unpack(meta(dtype, batch, tokens, 3, heads, dim)) for _ in range(2))
    given, options = (None, meta(torch.float32, heads)), xca_launch.Options(True, 1e-12)
    with recorded(memory) as found:
        out, state = xca_launch.forward(q, k, v, given, options, True, signature_of(q, k, v))
        xca_launch.backward(torch.empty_like(out), q, k, v, dq, dk, dv, given, [state], options, (True,))
    return found


def local(dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int) -> Recorder:
    """What a 5×5 filter over the grid launches, forward and backward."""
    v, grad, out, *_ = rows(dtype, batch, heads, tokens, dim)
    weight, bias = meta(torch.float32, 1, 1, dim, 5, 5), meta(torch.float32, 1, 1, dim)
    grid = local_launch.Grid(tokens // 14, 14)
    with recorded() as found:
        local_launch.forward(v, weight, bias, grid, out, out)
        local_launch.value_gradient(grad, weight, grid, out, out)
        local_launch.weight_gradient(grad, v, weight, bias, grid, (False, True))
    return found


def norm_gelu(dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int) -> Recorder:
    """What the shortcut launches beside the linear core, in training and in evaluation."""
    (_, _, v), (_, _, dv) = (unpack(meta(dtype, batch, tokens, 3, heads, dim)) for _ in range(2))
    out, *running = (
        meta(dtype, batch, tokens, heads, dim).transpose(1, 2),
        *(meta(torch.float32, dim) for _ in range(2)),
    )
    with recorded() as found:
        mean, var = norm_gelu_launch.take_moments(v, *running, meta(torch.int64), 0.1)
        for own in (True, False):
            options = norm_gelu_launch.Options("square", 1e-15, 1e-15, True, "", 1e-5, own)
            norm_gelu_launch.add(v, out, (mean, var, *running), options)
            norm_gelu_launch.add_gradient(out, v, dv, (mean, var, *running), options, (True, True))
    return found


def memory_of(capability: int) -> int:
    """Bytes of shared memory that a program can have on a chip of this compute capability."""
    return 1024 * {80: 163, 90: 227, 100: 227}.get(capability, 99)


def build(launch: Launch, tensors: tuple[Tensor | None, ...], capability: int = 90) -> Any:
    """The kernel compiled for a chip of this compute capability, whose shared memory it fits."""
    import triton.language as tl
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    kinds = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.bool: tl.int1}
    kinds[torch.int64] = tl.int64
    pointers = [None if tensor is None else MockTensor(kinds[tensor.dtype]) for tensor in tensors]
    options = {name: value for name, value in launch.options.items() if value is not None}
    with mock.patch.object(driver, "_active", Chip(capability)):
        compiled = launch.kernel.warmup(*pointers, *launch.values, grid=launch.grid, **options)
    assert compiled.metadata.shared <= memory_of(capability)
    return compiled


def instructions(launch: Launch, tensors: tuple[Tensor | None, ...], folder: Path) -> tuple[list[str], dict[str, int]]:
    """The machine code, an instruction a line, and where its labels point.

    `-ndf`: without an analysis of where it branches to, which is not read and a quarter of the time."""
    compiled = build(launch, tensors)
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([DISASSEMBLER, "-c", "-ndf", file], capture_output=True, text=True, check=True).stdout
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            lines.append(re.sub(r"^@!?U?P\w+ ", "? ", found[1]))  # "? ": under a condition
    return lines, labels


def walk(lines: list[str], labels: dict[str, int]) -> Iterator[str]:
    """The instructions in the order they run, every loop twice."""
    again: set[int] = set()
    at = 0
    while at < len(lines):
        yield lines[at].removeprefix("? ")
        back = re.match(r"\? BRA.*`\(\.(L_x_\d+)\)", lines[at])
        if back and labels[back[1]] <= at and at not in again:
            again.add(at)
            at = labels[back[1]]
        else:
            at += 1


def written(line: str) -> set[int]:
    """The registers an instruction writes to, matrix products aside."""
    name, _, rest = line.partition(" ")
    first = re.match(r"R(\d+)\b", rest.strip())
    if first is None or name.startswith(("ST", "RED", "HGMMA")):
        return set()
    four = ".128" in name or (name.startswith("LDSM") and name.endswith(".4"))
    two = ".64" in name or ".WIDE" in name or (name.startswith("LDSM") and name.endswith(".2"))
    return set(range(int(first[1]), int(first[1]) + (4 if four else 2 if two else 1)))


def left_flying(lines: list[str]) -> set[int]:
    """How many groups of products the kernel's waits leave unfinished."""
    waits = (re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", line) for line in lines)
    return {int(wait[1], 16) for wait in waits if wait}


def spoilt(lines: list[str], labels: dict[str, int]) -> tuple[int, list[str]]:
    """How many products take their left operand from registers, and what writes to these before it was waited for."""
    begun: list[tuple[str, set[int]]] = []  # products of the group that is not closed yet
    flying: list[list[tuple[str, set[int]]]] = []  # groups that may still run, the oldest first
    products: set[str] = set()
    bad: dict[str, None] = {}
    for line in walk(lines, labels):
        if line.startswith("HGMMA"):
            left = line.split(",")[1].strip()
            register = re.fullmatch(r"R(\d+)(\.reuse)?", left)
            taken = set(range(int(register[1]), int(register[1]) + 4)) if register else set()
            begun.append((line, taken))
            if taken:
                products.add(line)
            if "gsb0" in line:
                flying.append(begun)
                begun = []
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", line):
            left_over = int(wait[1], 16)
            flying = flying[len(flying) - left_over :] if left_over else []
        elif registers := written(line):
            for product, taken in (item for group in (*flying, begun) for item in group):
                if registers & taken:
                    bad[f"{line}  while  {product}"] = None
    return len(products), list(bad)
