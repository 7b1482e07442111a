"""What linear attention's kernels compute and in which pieces: a small rule, nothing is tuned at run time.

Three ways, chosen by how many programs there would be and how many tokens each would walk:

    one launch, a program per batch and group of heads      enough programs to fill the chip
    one launch, with chunks of queries                      few programs, few tokens: states are computed redundantly
    phase by phase, tokens split over programs              few programs, many tokens: partial states are added up
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Formula(NamedTuple):
    """Which linear attention: `scale · (phi(q)·(phi(k)ᵀ·v) + constant·Σv) / (row sum)`, then own value and L2 norm."""

    feature: str
    row_sum: bool = False
    clamp: bool = False  # the row sum is at least eps; otherwise eps is added
    scale: float = 1.0
    eps: float = 0.0
    feature_eps: float = 0.0
    own: float = 0.0  # this times the query's own value is added
    norm: bool = False  # the output is divided by its L2 norm, at least norm_eps
    norm_eps: float = 0.0


@dataclass(frozen=True)
class Layout:
    """How heads and channels are laid into tiles: `group` heads of `key_width` and `value_width` columns each."""

    group: int
    key_width: int
    value_width: int
    value_blocks: int

    @property
    def numbers(self) -> int:
        """Size of one program's state and sums."""
        keys, values = self.group * self.key_width, self.group * self.value_width
        return keys * values + keys + 2 * values

    def programs(self, batch: int, heads: int) -> int:
        return batch * -(-heads // self.group) * self.value_blocks


WIDE = 64  # columns that heads are grouped to: 128 bytes of half precision, a matrix instruction's height
LARGEST_STATE = {2: 128 * 128, 4: 128 * 64}  # numbers that fit a program's registers and shared memory, by itemsize


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def layout_of(heads: int, head_dim: int, value_dim: int, itemsize: int) -> Layout:
    key_width, value_width = power_of_two(head_dim), power_of_two(value_dim)
    group = min(max(1, WIDE // max(key_width, value_width)), power_of_two(heads))
    key_width, value_width = (max(w, 16 // group) for w in (key_width, value_width))
    largest = min(128, LARGEST_STATE[itemsize] // (group * key_width))
    value_width = min(value_width, largest)
    return Layout(group, key_width, value_width, -(-value_dim // value_width))


@dataclass(frozen=True)
class Plan:
    """One direction's launches. `phases` is ("both",) or the two phases one after the other."""

    phases: tuple[str, ...]
    query_chunk: int
    key_chunk: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int
    registers: int | None  # at most, per thread


SMALL = 512  # tokens up to which reading all of them again in every chunk beats a second launch, if programs are few
MOST_PARTS = 48  # partial states that are added up before more programs stop to pay


def plan(
    layout: Layout, programs: int, queries: int, keys: int, processors: int, itemsize: int,
    row_sum: bool, backward: bool,
) -> Plan:  # fmt: skip
    """How to launch: measured on an H200 with bfloat16, over 1 to 768 programs and 196 to 12,544 tokens."""
    columns = max(WIDE, layout.group * max(layout.key_width, layout.value_width))
    block = max(16, 8192 // (columns * itemsize))  # 8 KiB a tile
    warps = 8 if columns > WIDE else 4
    small = columns == WIDE and itemsize == 2
    stages = 3 if small else 2
    if small and not backward and programs > 4 * processors:
        stages = 4 if row_sum else 5  # three programs a processor: further ahead, and fuller last waves
    registers = 168 if small and row_sum and backward else None  # three programs a processor, for a few spills
    tokens = max(queries, keys)
    if programs >= processors:
        once = 4 * SMALL
    else:
        once = SMALL if backward else SMALL * (5 * processors + 3 * programs) // (4 * processors)
    phases: tuple[str, ...] = ("both",)
    chunks = 1
    if programs < 2 * processors and tokens > once:
        phases = ("queries", "keys") if backward else ("keys", "queries")
        chunks = min(3 * processors // programs, -(-tokens // (2 * block)), MOST_PARTS)
    elif programs < processors:
        chunks = min(1 + processors // programs, -(-tokens // block))
    elif programs < 2 * processors and tokens > SMALL:
        chunks = 2
    query_chunk, key_chunk = (max(block, -(-n // (chunks * block)) * block) for n in (queries, keys))
    chunks = max(-(-queries // query_chunk), -(-keys // key_chunk))
    return Plan(phases, query_chunk, key_chunk, chunks, block, warps, stages, registers)
