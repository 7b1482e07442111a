"""Where the tokens of windows lie in the picture.

A mechanism sees one window at a time. What cuts a picture into windows only moves tokens, so each token of a window is
found again among those of the picture, bit by bit, whoever cut it (Swin with its shift, SAM, MaxViT, Twins …). That is
done on noise, where no two tokens are alike. Hiera keeps its tokens in an order of its own and is asked for it.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.conversion import find_hosts
from linvit.conversion.host import PROJECTIONS
from linvit.conversion.hosts.pooled import HieraHost, layout

RECENT = 12  # tensors that a window may be cut from


@dataclass(frozen=True)
class Places:
    """For each token of each window its number in the picture, `(windows, tokens)`, or −1 for padding."""

    index: Tensor
    grid: TokenGrid  # of the picture

    def gather(self, per_token: Tensor) -> Tensor:
        """`(tokens,)` of the picture to `(windows, tokens)`, zero for padding."""
        return torch.where(self.index >= 0, per_token[self.index.clamp_min(0)], 0.0)

    def scatter(self, in_windows: Tensor, some: Tensor) -> Tensor:
        """`(some windows, heads, tokens)` to `(heads, tokens)` of the picture."""
        index = self.index[some]
        found = in_windows.new_zeros(in_windows.shape[1], self.grid.tokens + 1)
        index = torch.where(index >= 0, index, self.grid.tokens)
        found.index_add_(1, index.flatten(), in_windows.transpose(0, 1).flatten(1))
        return found[:, :-1]


def places_of_windows(model: nn.Module, image: Tensor, wanted: set[str]) -> dict[str, Places]:
    """Where the keys of these layers' windows lie; layers whose windows were not cut from a picture are left out."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(image.shape, generator=generator).to(image)
    found: dict[str, Places] = {}
    recent: deque[Tensor] = deque(maxlen=RECENT)

    def remember(module: nn.Module, args: Any, out: Any = None) -> None:
        seen = (args[0] if args else None) if out is None else out
        if isinstance(seen, Tensor) and seen.ndim in (3, 4):
            recent.append(seen)

    handles = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(remember), module.register_forward_hook(remember)]
    for name, host in find_hosts(model):
        if name not in wanted:
            continue

        def match(module: nn.Module, args: Any, name: str = name) -> None:
            places = cut_from(args[0], recent, (image.shape[-2], image.shape[-1])) if name not in found else None
            if places is not None:
                found[name] = places

        inside = (getattr(host, part, None) for part in PROJECTIONS)  # some cut windows themselves, before projecting
        handles += [m.register_forward_pre_hook(match) for m in (host, *inside) if isinstance(m, nn.Module)]
    try:
        model(noise)
    finally:
        for handle in handles:
            handle.remove()
    return found


def cut_from(windows: Tensor, recent: "deque[Tensor]", size: tuple[int, int]) -> Places | None:
    """Where windows `(windows, …, channels)` were cut from: the latest picture that has their tokens."""
    channels = windows.shape[-1]
    if windows.shape[0] == 1:
        return None
    tokens = keys_of(windows.reshape(windows.shape[0], -1, channels))
    for source in reversed(recent):
        if source.shape[0] != 1 or source is windows:
            continue
        if source.ndim == 4 and source.shape[-1] != channels:
            source = source.permute(0, 2, 3, 1)
        if source.shape[-1] != channels:
            continue
        grid = TokenGrid(source.shape[1], source.shape[2]) if source.ndim == 4 else sequence_grid(source.shape[1], size)
        if grid is None:
            continue
        order, index = keys_of(source.reshape(-1, channels)).sort()
        at = torch.searchsorted(order, tokens).clamp_max(len(order) - 1)
        places = torch.where(order[at] == tokens, index[at], -1)
        moved = not torch.equal(places.flatten(), torch.arange(places.numel(), device=places.device))
        if moved and len(places[places >= 0].unique()) == grid.tokens:  # else these are windows already
            return Places(places, grid)
    return None


def keys_of(tokens: Tensor) -> Tensor:
    """A number for each token, the bits of its first two channels."""
    return tokens[..., :2].float().contiguous().view(torch.int64).squeeze(-1)


def sequence_grid(tokens: int, size: tuple[int, int]) -> TokenGrid | None:
    """The grid of a sequence of patches of an image of this size, by the stride that gives as many."""
    for stride in range(1, max(size) + 1):
        height, width = (-(-side // stride) for side in size)
        if height * width == tokens:
            return TokenGrid(height, width)
    return None


def places_in_hiera(host: HieraHost, queries: int, keys: int, windows: int) -> tuple[Places, Places]:
    """Where the queries and the keys of Hiera's mask units, or of its whole picture, lie."""
    pooled = host.strides[1:] if host.q_stride > 1 else host.strides
    within = (1, 1) if host.use_mask_unit_attn else host.units
    found = []
    for strides, tokens in ((pooled, queries), (host.strides, keys)):
        grid, order = layout(strides, host.units)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))  # of a token in Hiera's order, the place row by row
        index = place.reshape(tokens, windows).t()
        if not host.mechanism.capabilities.equivariant:  # which gets them row by row
            index = index[:, layout(strides, within)[1]]
        found.append(Places(index, grid))
    return found[0], found[1]


def row_by_row(host: HieraHost, out: Tensor) -> Tensor:
    """What Hiera's block puts out, in the order of the picture."""
    order = layout(host.strides[1:] if host.q_stride > 1 else host.strides, host.units)[1]
    return out[:, order] if out.ndim == 3 and out.shape[1] == len(order) else out


def pooled_places(keys: Places, grid: TokenGrid, key_grid: TokenGrid) -> Places:
    """Where queries lie that are pooled from the keys of their window, whose grids these are."""
    rows, columns = key_grid.height // grid.height, key_grid.width // grid.width
    if (rows, columns) == (1, 1):
        return keys
    corners = keys.index.unflatten(1, (key_grid.height, key_grid.width))[:, ::rows, ::columns].flatten(1)
    whole = TokenGrid(-(-keys.grid.height // rows), -(-keys.grid.width // columns))
    row, column = corners // keys.grid.width // rows, corners % keys.grid.width // columns
    return Places(torch.where(corners >= 0, row * whole.width + column, -1), whole)
