# mypy: disable-error-code="no-untyped-def, assignment"
"""The state of linear attention: what tiles of keys leave of a head, and how it lies in memory."""

import triton
import triton.language as tl

from linvit.kernels.tiles import part


@triton.jit
def diagonal(state, G: tl.constexpr):
    """The state with what one head's keys say to another's values dropped."""
    if G > 1:
        whole = state[0]
        of_key = tl.arange(0, whole.shape[0]) // (whole.shape[0] // G)
        of_value = tl.arange(0, whole.shape[1]) // (whole.shape[1] // G)
        state = (tl.where(of_key[:, None] == of_value[None, :], whole, 0.0),)
    return state


@triton.jit
def averaged(state, key_sum):
    """A state divided by its keys' sums, zero where there are no keys."""
    J: tl.constexpr = len(state) // len(key_sum)
    out = ()
    for i in tl.static_range(len(key_sum)):
        inverse = tl.where(key_sum[i] == 0, 0.0, 1 / key_sum[i])[:, None]
        for j in tl.static_range(J):
            out += (state[i * J + j] * inverse,)
    return out


@triton.jit
def save_state(ptr, state, key_sum, value_sum, count):
    """One program's state and sums in a row: the state, line by line, Σ phi(k), Σ v, and counts for the first piece."""
    J: tl.constexpr = len(value_sum)
    C: tl.constexpr = key_sum[0].shape[0]
    V: tl.constexpr = value_sum[0].shape[0]
    CS: tl.constexpr = C if len(key_sum) == 1 else C + key_sum[len(key_sum) - 1].shape[0]
    VS: tl.constexpr = V if J == 1 else V + value_sum[J - 1].shape[0]
    for i in tl.static_range(len(key_sum)):
        for j in tl.static_range(J):
            piece = state[i * J + j]
            tl.store(part(ptr, i, j, C, V, piece.shape[0], piece.shape[1], VS), piece)
        tl.store(ptr + CS * VS + i * C + tl.arange(0, key_sum[i].shape[0]), key_sum[i])
    for j in tl.static_range(J):
        tl.store(ptr + CS * VS + CS + j * V + tl.arange(0, value_sum[j].shape[0]), value_sum[j])
    tl.store(ptr + CS * VS + CS + VS + tl.arange(0, V), count)


@triton.jit
def load_state(ptr, C: tl.constexpr, CR: tl.constexpr, V: tl.constexpr, VR: tl.constexpr):
    """What `save_state` left; the pieces are C and CR, V and VR wide, zero where there is one."""
    CS: tl.constexpr = C + CR
    VS: tl.constexpr = V + VR
    state, key_sum, value_sum = (), (), ()
    for i in tl.static_range(2 if CR else 1):
        for j in tl.static_range(2 if VR else 1):
            state += (tl.load(part(ptr, i, j, C, V, CR if i else C, VR if j else V, VS)),)
        key_sum += (tl.load(ptr + CS * VS + i * C + tl.arange(0, CR if i else C)),)
    for j in tl.static_range(2 if VR else 1):
        value_sum += (tl.load(ptr + CS * VS + CS + j * V + tl.arange(0, VR if j else V)),)
    return state, key_sum, value_sum, tl.load(ptr + CS * VS + CS + VS + tl.arange(0, V))
