"""Linear attention as one op, forward and backward: `linear_attention(q, k, v, formula)`, linvit::linear_attention.

Where one program serves a head, forward reads q, k and v and writes the output, and backward reads q, k, v and the
output's gradient and writes dq, dk and dv: eleven tensors in all. Between them lies a state of head_dim² numbers for
each head. With few tokens that is more than softmax saves, and backward reads k and v once more instead.

A small rule chooses how kernels are launched, nothing is tuned at run time. There are three ways, by how many programs
there would be and how many tokens each would walk:

    one launch, a program per batch and group of heads      enough programs to fill the chip
    one launch, with chunks of queries                      few programs, few tokens: states are computed redundantly
    phase by phase, tokens split over programs              few programs, many tokens: partial states are added up
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.kernels import fused
from linvit.kernels.fused import Launch, Strides, launch_cache, power_of_two, processors, rows_like, signature_of
from linvit.kernels.operators import register

FEATURES = ("relu", "elu_plus_one", "sigmoid", "direction", "square", "softmax", "key_softmax", "identity")
WIDEST = {2: 512, 4: 256}  # channels of a head that are served, by itemsize
LONGEST_STRIDE = 2**22  # of tokens and channels: offsets within a block are 32-bit
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


def layout_of(heads: int, head_dim: int, value_dim: int, itemsize: int) -> Layout:
    key_width, value_width = power_of_two(head_dim), power_of_two(value_dim)
    group = min(max(1, WIDE // max(key_width, value_width)), power_of_two(heads))
    key_width, value_width = (max(w, 16 // group) for w in (key_width, value_width))
    largest = min(128, LARGEST_STATE[itemsize] // (group * key_width))
    value_width = min(value_width, largest)
    return Layout(group, key_width, value_width, -(-value_dim // value_width))


@dataclass(frozen=True)
class Split:
    """How one direction's work falls into launches. `phases` is ("both",) or the two phases one after the other."""

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


def split_of(
    layout: Layout, programs: int, queries: int, keys: int, processors: int, itemsize: int,
    row_sum: bool, backward: bool,
) -> Split:  # fmt: skip
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
    return Split(phases, query_chunk, key_chunk, chunks, block, warps, stages, registers)


@dataclass(frozen=True)
class Launches:
    """One direction's launches for one signature: by phase, and the sum of partial states between."""

    phases: tuple[Launch, ...]
    add: Launch | None
    programs: int
    chunks: int
    layout: Layout
    saves: bool

    @property
    def split(self) -> bool:
        return len(self.phases) > 1

    def empty_state(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for a state and for its partial ones, which is the same where there is one of them."""
        state = torch.empty((self.programs, self.layout.numbers), dtype=torch.float32, device=device)
        return state, state if self.add is None else state.new_empty(self.chunks, *state.shape)


@launch_cache
def prepare(
    what: str, signature: tuple[Any, ...], formula: Formula, mask_strides: Strides | None,
    constant_dtype: torch.dtype | None, saves: bool, grad_strides: Strides = (), d_strides: tuple[Strides, ...] = (),
) -> Launches:  # fmt: skip
    """Launches for tensors of this signature: "forward", "backward" or the "state" alone.

    `grad_strides` are those of the output's gradient, `d_strides` those of dq, dk and dv.
    """
    from linvit.kernels.linear import kernels

    q, k, v, *strides, dtype, _, _, device, _, _ = signature
    (batch, heads, queries, head_dim), keys, value_dim = q, v[2], v[3]
    layout = layout_of(heads, head_dim, value_dim, dtype.itemsize)
    programs = layout.programs(batch, heads)
    sums = formula.row_sum or formula.feature in OVER_TOKENS
    sizes = (queries, keys, processors(device), dtype.itemsize)
    how = split_of(layout, programs, *sizes, row_sum=sums, backward=what == "backward")
    kernel = kernels.forward_kernel
    if what == "backward":
        from linvit.kernels.linear.gradients import backward_kernel as kernel

        dq, dk, dv = d_strides
        others = (*grad_strides, *part_strides(layout, q, dq), *part_strides(layout, k, dk), *dv[:3])
    else:
        others = (queries * heads * value_dim, value_dim, heads * value_dim, 1)
    if what == "state":
        how = replace(how, phases=("keys",))
    columns = (layout.key_width, layout.value_width * layout.value_blocks, heads % layout.group)
    padded = columns != (head_dim, value_dim, 0)
    values = (
        *(stride for of in strides for stride in of), *others, *(mask_strides or (0, 0)),
        *(heads, queries, keys, how.query_chunk, how.key_chunk),
        *(formula.scale, formula.eps, formula.feature_eps, formula.own, formula.norm_eps),
    )  # fmt: skip
    constants = (
        *(formula.feature, formula.row_sum, formula.clamp, formula.own != 0, formula.norm, head_dim, value_dim),
        *(layout.group, layout.key_width, layout.value_width, layout.value_blocks, how.block, padded),
        *fused.operands(dtype, device.type == "cpu"),
    )
    options = {"num_warps": how.num_warps, "num_stages": how.num_stages, "maxnreg": how.registers}
    grid = (programs, how.chunks, 1)
    phases = tuple(Launch(kernel, grid, (*values, phase, *constants), **options) for phase in how.phases)
    add = None
    if how.phases != ("both",) and how.chunks > 1:
        size = programs * layout.numbers
        add = Launch(kernels.add_partials, (-(-size // 128), 1, 1), (how.chunks, size, 16, 128))
    return Launches(phases, add, programs, how.chunks, layout, saves and keeps_state(layout, heads, queries))


def keeps_state(layout: Layout, heads: int, queries: int) -> bool:
    """Whether forward saves the state for backward, which computes it again otherwise.

    It does where that takes no more memory than the row sums that softmax saves: a float32 number for each query. Below
    that many tokens k and v are often still in the cache when backward reads them once more.
    """
    return bool(layout.programs(1, heads) * layout.numbers <= heads * queries)


def state_sizes(q: Tensor, v: Tensor, formula: Formula) -> tuple[tuple[int, ...]]:
    """The size of what forward saves, zero where it is nothing."""
    batch, heads, queries, head_dim = q.shape
    layout = layout_of(int(heads), int(head_dim), int(v.shape[3]), q.dtype.itemsize)
    return ((layout.programs(batch, heads), layout.numbers) if keeps_state(layout, heads, queries) else (0,),)


def part_strides(layout: Layout, shape: torch.Size, strides: Strides) -> Strides:
    """Strides of a gradient's parts, one per block of values and dense; a single part is the gradient itself."""
    _, heads, tokens, dim = shape
    if layout.value_blocks == 1:
        return (0, *strides[:3])
    return (shape.numel(), heads * tokens * dim, tokens * dim, dim)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, constant: Tensor | None, formula: Formula, save: bool,
    signature: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output, as a (batch, heads, queries, value_dim) view of (batch, queries, heads, value_dim), and the state."""
    how = prepare(
        "forward", signature, formula, None if mask is None else mask.stride(),
        None if constant is None else constant.dtype, save,
    )  # fmt: skip
    out = rows_like(v, q.shape[2])
    shift = shift_of(k, mask, formula)
    if not (how.saves or how.split):
        how.phases[0](q, k, v, out, mask, constant, shift, None)
        return out, None
    state = run_keys(how, q, k, v, out, mask, constant, shift)
    if how.split:
        how.phases[1](q, k, v, out, mask, constant, shift, state)
    return out, state if how.saves else None


def shift_of(k: Tensor, mask: Tensor | None, formula: Formula) -> Tensor | None:
    """What a softmax over tokens subtracts from its exponents: the largest of each channel, dense; otherwise None."""
    if formula.feature not in OVER_TOKENS:
        return None
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], float("-inf"))
    return k.amax(2).contiguous()


def run_keys(
    how: Launches, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, constant: Tensor | None,
    shift: Tensor | None,
) -> Tensor:  # fmt: skip
    """The first of the forward launches, and the state that it leaves."""
    state, partial = how.empty_state(q.device)
    how.phases[0](q, k, v, out, mask, constant, shift, partial)
    if how.add is not None:
        how.add(partial, state)
    return state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, mask: Tensor | None,
    constant: Tensor | None, saved: list[Tensor | None], formula: Formula, wanted: bool,
) -> Tensor | None:  # fmt: skip
    """Writes dq, dk and dv, whose last dimension is dense; returns the constant's gradient if it is wanted."""
    (state,) = saved
    signature, d_strides = signature_of(q, k, v), (dq.stride(), dk.stride(), dv.stride())
    kinds = (None if mask is None else mask.stride(), None if constant is None else constant.dtype)
    how = prepare("backward", signature, formula, *kinds, state is None, grad.stride(), d_strides)
    shift = shift_of(k, mask, formula)
    by_state = how.split or constant is not None
    if state is None and by_state:
        again = prepare("state", signature, formula, *kinds, True)
        state = run_keys(again, q, k, v, grad, mask, constant, shift)
    dq_parts, dk_parts = dq, dk
    blocks = how.layout.value_blocks
    if blocks > 1:
        dq_parts, dk_parts = (d.new_empty(blocks, *d.shape, dtype=torch.float32) for d in (dq, dk))
    d_state, partial = how.empty_state(q.device) if by_state else (None, None)
    for launch, where in zip(how.phases, (partial, d_state), strict=False):
        launch(q, k, v, grad, dq_parts, dk_parts, dv, mask, constant, shift, state, where)
        if how.add is not None and where is partial:
            how.add(partial, d_state)
    if blocks > 1:
        dq.copy_(dq_parts.sum(0))
        dk.copy_(dk_parts.sum(0))
    if constant is None or not wanted:
        return None
    assert state is not None and d_state is not None
    values = how.layout.group * how.layout.value_width
    sums, d_sums = state[:, -2 * values :], d_state[:, -2 * values :]
    by_value = (sums[:, :values] * d_sums[:, :values]).sum()
    by_count = (sums[:, values] * d_sums[:, values:].sum(1)).sum() / how.layout.value_width
    return (by_value + by_count if formula.row_sum else by_value).to(constant.dtype)


def why_not(q: Tensor, k: Tensor, v: Tensor, formula: Formula) -> str | None:
    """Why the kernel cannot serve these tensors, or None where it can."""
    why = fused.unserved(q, k, v)
    if why is not None:
        return why
    head_dim, value_dim, size = q.shape[3], v.shape[3], q.dtype.itemsize
    if formula.feature not in FEATURES:
        return f"there is no kernel for the feature map '{formula.feature}'"
    if head_dim > WIDEST[size] or value_dim > WIDEST[2]:
        return f"features of {head_dim} or values of {value_dim} channels are too wide for {q.dtype}"
    if (
        q.is_cuda
        and q.dtype == torch.float32
        and max(head_dim, value_dim) > 64
        and fused.shared_memory(q.device) < 168_000
    ):
        return "float32 heads wider than 64 need more shared memory than this GPU has"
    if formula.own and q.shape[2] != k.shape[2]:
        return "the term with the query's own value needs as many keys as queries"
    if formula.norm and layout_of(q.shape[1], head_dim, value_dim, size).value_blocks > 1:
        return f"values of {value_dim} channels are too wide for the fused output norm"
    if max(q.stride()[2:] + k.stride()[2:] + v.stride()[2:]) > LONGEST_STRIDE:
        return "tokens or channels are further apart than 32-bit offsets reach"
    return None


def flops(q: torch.Size, v: torch.Size, formula: Formula) -> int:
    """Two per multiply-accumulate of the two products, and of the row sum, as in the plain reference."""
    batch, heads, queries, head_dim = q
    return 2 * batch * heads * head_dim * ((queries + v[2]) * v[3] + (queries if formula.row_sum else 0))


op = register(
    fused.FusedOp(
        "linear_attention", Formula, forward, backward,
        flops=flops, learned="constant", saved=("state",), saved_sizes=state_sizes, lazy=True,
    )
)  # fmt: skip


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, mask: Tensor | None = None, constant: Tensor | None = None
) -> Tensor:
    """`(batch, heads, queries, value_dim)` from q, k, v in any strides; a view of (batch, queries, heads, value_dim).

    `mask`, boolean (batch, keys), is true for the keys that take part; `constant` is a scalar that the formula adds to
    every product of a query and a key.
    """
    return op(q, k, v, mask, constant, formula)
