"""Which linear attention, how heads and channels are laid into tiles, and how the work falls into launches.

A small rule chooses how kernels are launched, nothing is tuned at run time. There are three ways, by how many programs
there would be and how many tokens each would walk:

    one launch, a program per batch and group of heads      enough programs to fill the chip
    one launch, with chunks of queries                      few programs, few tokens: states are computed redundantly
    phase by phase, tokens split over programs              few programs, many tokens: partial states are added up
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from linvit.kernels.fused import MEMORY, power_of_two

FEATURES = ("relu", "elu_plus_one", "sigmoid", "direction", "square", "softmax", "key_softmax", "identity")
WIDEST = {2: 512, 4: 256}  # channels of a head that are served, by itemsize
MOST_FILTERED = 4  # heads of a tile that are filtered along the tokens, each by itself
OVER_TOKENS = ("softmax", "key_softmax")  # feature maps whose keys are a softmax over tokens


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
    squared: bool = False  # the constant is the square of the tensor that is given
    turn: str = ""  # "pairs" or "halves": features are turned by rotary position, see features.py
    height: int = 0  # of the grid that a local filter of the values runs over, if there is one
    width: int = 0
    prefix: int = 0  # tokens before the grid


@dataclass(frozen=True)
class Layout:
    """How heads and channels are laid into tiles: `group` heads of `key_width` and `value_width` columns each, and the
    rest of a head's channels, if they have a tile of their own."""

    group: int
    key_width: int
    key_rest: int
    value_width: int
    value_rest: int
    value_blocks: int

    @property
    def keys(self) -> int:
        """Columns of a program's keys."""
        return self.group * self.key_width + self.key_rest

    @property
    def values(self) -> int:
        return self.group * self.value_width + self.value_rest

    @property
    def numbers(self) -> int:
        """Size of one program's state and sums."""
        return self.keys * self.values + self.keys + self.values + self.group * self.value_width

    def programs(self, batch: int, heads: int) -> int:
        return batch * -(-heads // self.group) * self.value_blocks


WIDE = 64  # columns that heads are grouped to: 128 bytes of half precision, a matrix instruction's height
ENOUGH = 160_000  # bytes of shared memory with which a program need not spare any; graphics cards have 101,376
LARGEST_STATE = {2: 128 * 128, 4: 128 * 64}  # numbers that fit a program's registers and shared memory, by itemsize


def pieces(dim: int, least: int = 1) -> tuple[int, int]:
    """Columns for so many channels: a power of two, or 64 and a rest where that spares a fourth and more."""
    rest = max(16, power_of_two(dim - WIDE)) if dim > WIDE else 0
    return (WIDE, rest) if 0 < rest < WIDE else (max(least, power_of_two(dim)), 0)


def layout_of(heads: int, head_dim: int, value_dim: int, itemsize: int, memory: int = MEMORY) -> Layout:
    (key_width, key_rest), (value_width, value_rest) = pieces(head_dim), pieces(value_dim)
    group = min(max(1, WIDE // max(key_width + key_rest, value_width + value_rest)), power_of_two(heads))
    key_width, value_width = (max(w, 16 // group) for w in (key_width, value_width))
    numbers = LARGEST_STATE[itemsize] // (2 if memory < ENOUGH and itemsize > 2 else 1)
    largest = min(128, numbers // (group * key_width + key_rest))
    if value_width + value_rest > largest:
        value_width, value_rest = min(power_of_two(value_dim), 1 << (largest.bit_length() - 1)), 0
    blocks = -(-value_dim // (value_width + value_rest))
    return Layout(group, key_width, key_rest, value_width, value_rest, blocks)


def keeps_state(layout: Layout, heads: int, queries: int) -> bool:
    """Whether forward saves the state for backward, which computes it again otherwise.

    It does where that takes no more memory than the row sums that softmax saves: a float32 number for each query. Below
    that many tokens k and v are often still in the cache when backward reads them once more.
    """
    return bool(layout.programs(1, heads) * layout.numbers <= heads * queries)


@dataclass(frozen=True)
class Split:
    """How one direction's work falls into launches. `phases` is ("both",) or the two phases one after the other."""

    phases: tuple[str, ...]
    query_chunk: int
    key_chunk: int
    chunks: int
    block: int  # tokens of a tile
    state_block: int  # of those that a state is computed from
    num_warps: int
    num_stages: int
    registers: int | None  # at most, per thread


SMALL = 512  # tokens up to which reading all of them again in every chunk beats a second launch, if programs are few
MOST_PARTS = 48  # partial states that are added up before more programs stop to pay


def split_of(
    layout: Layout, programs: int, queries: int, keys: int, processors: int, memory: int, dtype: torch.dtype,
    formula: Formula, backward: bool,
) -> Split:  # fmt: skip
    """How to launch: measured on an H200 with bfloat16, over 1 to 768 programs and 196 to 12,544 tokens.

    `memory` is what a program can have of shared memory; the chips of graphics cards have less than half of an H200's.
    """
    itemsize = dtype.itemsize
    columns = max(WIDE, layout.keys, layout.values)
    pieces = columns < 128
    block = max(16, 8192 // ((WIDE if pieces else columns) * itemsize))  # 8 KiB a tile, and the rest of a head
    warps = 4 if pieces and (columns == WIDE or itemsize == 2) else 8
    small = columns == WIDE and itemsize == 2
    stages = 3 if small or (itemsize == 2 and not backward) else 2
    if (formula.turn and itemsize > 2) or (formula.height and dtype == torch.float16 and columns == 128):
        stages = 1  # angles and bands, which are in float32, take their share
    if columns == 128 and itemsize == 2 and not backward:
        block = 64  # with fewer tokens products run on the slower of Hopper's two matrix units
    tokens = max(queries, keys)
    if memory < ENOUGH:
        if dtype != torch.bfloat16:  # states are in float32
            block, stages = 16, 1
        elif columns >= 96 and (formula.turn or formula.height):  # so do they in bfloat16
            stages = 1
    elif small and programs < processors and tokens <= SMALL // 2:
        block, warps, stages = 128, 8, 2  # two rounds at most
    full = 4 * programs >= 3 * processors
    registers = None
    sums = formula.row_sum or formula.feature in OVER_TOKENS
    if small and sums and backward and programs > 2 * processors:
        registers = 168  # three programs a processor, for a few spills
    once = SMALL * (5 * processors + 3 * programs) // (4 * processors)
    if formula.feature == "square":
        once //= 2  # features that take long are computed once
    if backward:
        once = 2 * SMALL if formula.feature in OVER_TOKENS else SMALL  # a split needs the largest keys from a launch
    if full and not (backward and columns != WIDE and pieces):
        once = 4 * SMALL
    phases: tuple[str, ...] = ("both",)
    chunks = 1
    if backward and memory < ENOUGH and columns == 128 and dtype == torch.float16:
        once = tokens  # a state that is loaded to be multiplied from both sides takes twice its size
    if tokens > once and (programs < 2 * processors or (backward and once < 4 * SMALL)):
        phases = ("queries", "keys") if backward else ("keys", "queries")
        waves = 3 if columns == WIDE else 2 if pieces else 1
        if small and backward and programs * tokens < 2 * block * processors:
            block = 32
        chunks = max(1, min(waves * processors // programs, -(-tokens // (2 * block)), MOST_PARTS))
    elif programs < processors:
        chunks = min(max(1, processors // programs), -(-tokens // block))
    elif programs < 2 * processors and tokens <= SMALL and not backward:
        chunks = 2
    query_chunk, key_chunk = (max(block, -(-n // (chunks * block)) * block) for n in (queries, keys))
    chunks = max(-(-queries // query_chunk), -(-keys // key_chunk))
    return Split(phases, query_chunk, key_chunk, chunks, block, block, warps, stages, registers)
