"""No register is written to while a matrix product still reads it: read off the machine code, see machine_code.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from linvit.kernels.fused import Launch
from tests.kernels import machine_code
from tests.kernels.linear_reference import FORMULAS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
compiled = pytest.mark.skipif(
    not machine_code.DISASSEMBLER.exists(), reason="this Triton came without NVIDIA's disassembler"
)


def check(
    found: machine_code.Recorder, folder: Path, *, waits: bool = False,
    also: Callable[[Launch, list[str]], None] = lambda launch, lines: None,
) -> int:  # fmt: skip
    """How many products there are; none is spoilt, and `also` holds for every kernel."""
    assert found.calls
    products = 0
    for launch, tensors in found.calls.values():
        lines, labels = machine_code.instructions(launch, tensors, folder)
        count, bad = machine_code.spoilt(lines, labels)
        assert not bad, f"{launch.kernel.fn.__name__}: {bad[:3]}"
        assert not waits or machine_code.left_flying(lines) == {0}
        also(launch, lines)
        products += count
    return products


@compiled
@pytest.mark.parametrize("dtype, batch, heads, tokens, dim", [(BF16, 2, 3, 197, 24), (FP16, 64, 6, 196, 64)], ids=str)
@pytest.mark.parametrize("name", ["stella", "relu", "elu", "qt", "efficient"])
def test_linear_attention(
    name: str, dtype: torch.dtype, batch: int, heads: int, tokens: int, dim: int, tmp_path: Path
) -> None:
    """No product outlives a round of its loop, whatever the compiler makes of the registers."""
    found = machine_code.linear(FORMULAS[name], dtype, batch, heads, tokens, dim)
    assert check(found, tmp_path, waits=True) > 0


@compiled
@pytest.mark.parametrize("name, dim", [("relu", 80), ("turned", 64)])
def test_pieces_and_rotary_position(name: str, dim: int, tmp_path: Path) -> None:
    formula = FORMULAS["relu"] if name == "relu" else FORMULAS["stella"]._replace(turn="halves")
    assert check(machine_code.linear(formula, BF16, 64, 12, 1025, dim), tmp_path) > 0


KERNELS: dict[str, Callable[[torch.dtype, int, int], machine_code.Recorder]] = {
    **{
        name: lambda dtype, dim, memory, formula=formula: machine_code.linear(formula, dtype, 64, 16, 1025, dim, memory)
        for name, formula in (*FORMULAS.items(), ("turned", FORMULAS["stella"]._replace(turn="halves")))
    },
    "relu, one image": lambda dtype, dim, memory: machine_code.linear(FORMULAS["relu"], dtype, 1, 3, 8192, dim, memory),
    "castling": lambda dtype, dim, memory: machine_code.linear(
        FORMULAS["angular"], dtype, 64, 16, 1025, dim, memory, taps=9
    ),
    "castling, one image": lambda dtype, dim, memory: machine_code.linear(
        FORMULAS["angular"], dtype, 1, 3, 197, dim, memory, taps=9
    ),
    "relu_quadratic": lambda dtype, dim, memory: machine_code.relu_quadratic(
        dtype, 64, 6, 1025, dim, biased=dim < 256, memory=memory
    ),
    "exact angular": lambda dtype, dim, memory: machine_code.angular(
        dtype, 64, 16, 1025, dim, masked=True, memory=memory
    ),
    "xca": lambda dtype, dim, memory: machine_code.xca(dtype, 64, 16, 1025, dim, memory),
    "mobile": lambda dtype, dim, memory: machine_code.mobile(dtype, 8, 32, 196, dim, dim),
    "mobile, 768 channels": lambda dtype, dim, memory: machine_code.mobile(dtype, 1, 768 // dim, 577, dim, 2),
    "local": lambda dtype, dim, memory: machine_code.local(dtype, 8, 6, 196, dim),
    "norm_gelu": lambda dtype, dim, memory: machine_code.norm_gelu(dtype, 8, 6, 197, dim),
}


@pytest.mark.parametrize(
    "capability, dtype, name, dim",
    [(80, BF16, "relu", 96), (86, FP16, "angular", 64), (86, FP32, "qt", 256), (89, BF16, "stella", 80),
     (100, BF16, "relu", 64), (120, FP32, "angular", 128),
     (80, FP16, "castling", 128), (86, FP16, "relu, one image", 128), (86, BF16, "castling, one image", 64),
     (89, BF16, "castling", 96), (120, BF16, "turned", 128),
     (86, BF16, "relu_quadratic", 96), (86, BF16, "relu_quadratic", 128), (86, BF16, "relu_quadratic", 256),
     (120, FP32, "relu_quadratic", 256),
     (80, FP16, "exact angular", 96), (86, FP32, "exact angular", 256), (100, BF16, "exact angular", 64),
     (120, BF16, "exact angular", 128),
     (80, FP16, "xca", 96), (86, BF16, "xca", 128), (89, FP32, "xca", 64), (120, BF16, "xca", 80),
     (89, FP32, "mobile", 8), (86, FP32, "mobile, 768 channels", 64), (86, BF16, "local", 64), (120, BF16, "local", 64),
     (86, FP32, "norm_gelu", 256), (120, BF16, "norm_gelu", 72)],
)  # fmt: skip
def test_fits_the_shared_memory_of_other_chips(capability: int, dtype: torch.dtype, name: str, dim: int) -> None:
    """Compiled for chips that are not there, at the extremes of head sizes and types."""
    found = KERNELS[name](dtype, dim, machine_code.memory_of(capability))
    assert found.calls
    for launch, tensors in found.calls.values():
        machine_code.build(launch, tensors, capability)


@compiled
@pytest.mark.parametrize("biased", [False, True])
def test_relu_quadratic(tmp_path: Path, biased: bool) -> None:
    found = machine_code.relu_quadratic(BF16, 64, 6, 197, 64, biased=biased)
    assert len(found.calls) == (4 if biased else 3) and check(found, tmp_path) > 0


@compiled
@pytest.mark.parametrize("dim", [72, 96])
def test_relu_quadratic_in_two_pieces(tmp_path: Path, dim: int) -> None:
    """All that a head of 72 channels reads and writes is 16 bytes wide, though 16 does not divide its stride."""

    def wide(launch: Launch, lines: list[str]) -> None:
        assert launch.values[1] == dim // 8
        names = {line.removeprefix("? ").split()[0] for line in lines}
        assert {name for name in names if name.startswith(("LDG.", "STG."))} == {"LDG.E.128", "STG.E.128"}
        assert {name for name in names if name.startswith("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}

    found = machine_code.relu_quadratic(BF16, 8, 16, 1024, dim, packed=True)
    assert check(found, tmp_path, also=wide) > 0


@compiled
@pytest.mark.parametrize("dim", [64, 80])
def test_angular(dim: int, tmp_path: Path) -> None:
    """The forward kernel's registers suffice: to spill some doubles the instructions of a tile."""

    def held(launch: Launch, lines: list[str]) -> None:
        spilled = any(line.removeprefix("? ").startswith(("LDL", "STL")) for line in lines)
        assert not spilled or launch.kernel.fn.__name__ != "forward_kernel"

    found = machine_code.angular(BF16, 64, 6, 197, dim)
    assert len(found.calls) == 4 and check(found, tmp_path, also=held) > 0


@compiled
@pytest.mark.parametrize(
    "batch, heads, tokens, dim, small, launches",
    [(8, 6, 197, 64, 2, 4), (32, 6, 577, 64, 2, 4), (8, 32, 196, 4, 4, 5)],
)
def test_mobile(batch: int, heads: int, tokens: int, dim: int, small: int, launches: int, tmp_path: Path) -> None:
    """Flows and keys in one launch where a token's channels fit the registers; the forward pass spills none."""

    def held(launch: Launch, lines: list[str]) -> None:
        name = launch.kernel.fn.__name__
        spilled = any(line.removeprefix("? ").startswith(("LDL", "STL")) for line in lines)
        assert not spilled or name not in ("sources_kernel", "queries_kernel"), name

    found = machine_code.mobile(BF16, batch, heads, tokens, dim, small)
    assert len(found.calls) == launches
    check(found, tmp_path, also=held)


@compiled
def test_local(tmp_path: Path) -> None:
    """Where a token lies on the grid is divided in 32 bits: a division of 64 is a call."""

    def divided(launch: Launch, lines: list[str]) -> None:
        assert not any(line.removeprefix("? ").startswith("CALL") for line in lines), launch.kernel.fn.__name__

    check(machine_code.local(BF16, 8, 6, 196, 64), tmp_path, also=divided)


@compiled
@pytest.mark.parametrize("dtype, dim", [(BF16, 72), (FP32, 256)], ids=str)
def test_norm_gelu(dtype: torch.dtype, dim: int, tmp_path: Path) -> None:
    """Values are read 16 bytes at a time, nothing is spilled, and no division is a call."""
    found = machine_code.norm_gelu(dtype, 8, 16, 577, dim)
    assert len(found.calls) == 7
    for launch, tensors in found.calls.values():
        lines, _ = machine_code.instructions(launch, tensors, tmp_path)
        name = launch.kernel.fn.__name__
        assert not any(line.removeprefix("? ").startswith(("LDL", "STL", "CALL")) for line in lines), name
        assert (name.startswith("add_") and name != "add_kernel") or any("LDG.E.128" in line for line in lines), name


@compiled
@pytest.mark.parametrize("batch, heads, tokens, dim", [(64, 6, 197, 64), (1, 16, 577, 72)])
def test_xca(batch: int, heads: int, tokens: int, dim: int, tmp_path: Path) -> None:
    """In one launch a direction, and with the tokens split for two."""
    found = machine_code.xca(BF16, batch, heads, tokens, dim)
    assert len(found.calls) == (2 if batch > 1 else 4)
    check(found, tmp_path)


def test_a_product_that_is_not_waited_for_is_found() -> None:
    start = ["HGMMA.64x64x16.F32.BF16 R24, R84, gdesc[UR4].tnspB, R24, gsb0"]
    wait = ["WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    loop = ["? BRA `(.L_x_1)"]
    good = ["IADD3 R87, R1, R2, RZ", *start, *wait, *loop]
    assert machine_code.spoilt(good, {"L_x_1": 0}) == (1, [])
    early = ["LDG.E.128 R84, desc[UR6][R2.64]", *wait, *start, *loop]
    count, bad = machine_code.spoilt(early, {"L_x_1": 0})
    assert count == 1 and len(bad) == 1 and bad[0].startswith("LDG.E.128 R84")
    kept = [*start, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "IADD3 R86, R1, R2, RZ"]
    assert len(machine_code.spoilt(kept, {})[1]) == 1
