"""Multi-head linear attention over blocks of tokens (MHLA, ICLR 2026): each block mixes the states of all blocks.

    S_b = Σ_{j in b} φ(k_j) v_jᵀ,  z_b = Σ_{j in b} φ(k_j),  φ = relu + 1e-6
    out = φ(q_i) · (Σ_b m_ab S_b) / (φ(q_i) · Σ_b m_ab z_b) + conv5×5(v),  a the block of query i

One state for all tokens has the rank of a head; a state for each block of the picture, mixed anew for each block of
queries, raises it, for a cost of M² states beside the tokens. m is learned and starts as 1 − distance/longest, columns
summing to one. The picture is cut into `blocks` × `blocks` blocks whatever its size, so that m fits every size; the
last blocks are smaller where it does not divide (ours: the code fixes a block's tokens and so the image).

    paper     the formula above (default)
    released  the code's normaliser, which mixes the products of other blocks' queries at the same place in their block:
              Σ_b m_ab φ(q_b)·z_b

Ours: |m|, because a row sum of weights of both signs may vanish; prefix tokens, which the code has none of, are seen by
all blocks and see all, with weight 1.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, GridConv, LinearAttention, RowSum, Shape, Size, TokenGrid, register
from linvit.attention.options import ConvWidth, Eps, Range

Side = Annotated[int, Range(1, 64)]


@dataclass(frozen=True)
class Blocks:
    """A grid cut into `side` × `side` blocks of equal size, of which the last may be in part or wholly empty. Batch and
    heads are one axis meanwhile: runtimes of small devices know six."""

    grid: TokenGrid
    side: int

    @property
    def block(self) -> tuple[int, int]:
        return -(-self.grid.height // self.side), -(-self.grid.width // self.side)

    @property
    def tokens(self) -> int:
        """Places in all blocks, empty ones too."""
        return self.side**2 * self.block[0] * self.block[1]

    def cut(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Prefix tokens, and patches as `(batch, heads, blocks, places, channels)`; empty places are zero."""
        (rows, columns), side = self.block, self.side
        prefix, patches = self.grid.split(x)
        picture = patches.flatten(0, 1).unflatten(1, (self.grid.height, self.grid.width))
        picture = F.pad(picture, (0, 0, 0, side * columns - self.grid.width, 0, side * rows - self.grid.height))
        tiles = picture.unflatten(2, (side, columns)).unflatten(1, (side, rows))
        return prefix, tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2).unflatten(0, x.shape[:2])

    def join(self, prefix: Tensor, tiles: Tensor) -> Tensor:
        """The inverse of `cut`."""
        picture = tiles.flatten(0, 1).unflatten(2, self.block).unflatten(1, (self.side, self.side)).transpose(2, 3)
        picture = picture.flatten(3, 4).flatten(1, 2)[:, : self.grid.height, : self.grid.width]
        return torch.cat((prefix, picture.flatten(1, 2).unflatten(0, tiles.shape[:2])), dim=2)

    def of_tokens(self, device: torch.device) -> Tensor:
        """The block of each patch."""
        rows = torch.arange(self.grid.height, device=device) // self.block[0]
        columns = torch.arange(self.grid.width, device=device) // self.block[1]
        return (rows[:, None] * self.side + columns).flatten()


@register("mhla", paper="MHLA")
class MHLA(LinearAttention):
    capabilities = Capabilities(grid=True, equivariant=False, rotary="features")
    variants = ("paper", "released")
    normaliser = RowSum(1e-6)

    def __init__(
        self, shape: Shape, *, variant: str | None = None, blocks: Side = 4, kernel_size: ConvWidth | None = 5,
        eps: Eps = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(shape, variant=variant)
        self.blocks, self.eps, self.conv = blocks, eps, None
        self.mixing = nn.Parameter(nearness(blocks))
        if kernel_size:
            self.require("heads", "head_dim")
            self.conv = GridConv((shape.heads or 1) * shape.values, kernel_size)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return torch.relu(q) + self.eps, torch.relu(k) + self.eps

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        phi_q, phi_k = self.features(q, k, call)
        phi_k = call.keep(phi_k)
        of_q, of_k = Blocks(call.grid, self.blocks), Blocks(call.key_grid, self.blocks)
        (first_q, tiles_q), (first_k, tiles_k) = of_q.cut(call.turn(phi_q)), of_k.cut(call.turn(phi_k))
        first_v, tiles_v = of_k.cut(v)
        mixing = self.mixing.abs().to(q.dtype)
        states = tiles_k.transpose(-2, -1) @ tiles_v
        common = first_k.transpose(-2, -1) @ first_v
        mixed = (mixing @ states.flatten(-2)).unflatten(-1, states.shape[-2:]) + common.unsqueeze(2)
        out = of_q.join(first_q @ (states.sum(2) + common), tiles_q @ mixed)
        return out / self.row_sums(phi_q, phi_k, call)

    def row_sums(self, phi_q: Tensor, phi_k: Tensor, call: Call) -> Tensor:
        """What the output is divided by, `(batch, heads, queries, 1)`."""
        of_q, of_k = Blocks(call.grid, self.blocks), Blocks(call.key_grid, self.blocks)
        (first_q, tiles_q), (first_k, tiles_k) = of_q.cut(phi_q), of_k.cut(phi_k)
        mixing, sums, common = self.mixing.abs().to(phi_q.dtype), tiles_k.sum(-2), first_k.sum(-2)
        if self.variant == "paper":
            rows = tiles_q @ (mixing @ sums + common.unsqueeze(2)).unsqueeze(-1)
        else:
            _, others = of_q.cut(phi_q if call.query_mask is None else call.keep(phi_q))
            own = (others @ sums.unsqueeze(-1)).squeeze(-1)
            rows = (mixing @ own).unsqueeze(-1) + tiles_q @ common[:, :, None, :, None]
        return of_q.join(first_q @ (sums.sum(2) + common).unsqueeze(-1), rows) + self.eps

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        phi_q, phi_k = self.features(q, k, call)
        phi_k = call.keep(phi_k)
        of_q, of_k = Blocks(call.grid, self.blocks), Blocks(call.key_grid, self.blocks)
        weights = self.mixing.abs().to(q.dtype)[of_q.of_tokens(q.device)][:, of_k.of_tokens(k.device)]
        weights = F.pad(weights, (call.key_grid.prefix, 0, call.grid.prefix, 0), value=1.0)
        products = call.turn(phi_q) @ call.turn(phi_k).transpose(-2, -1)
        return weights * products / self.row_sums(phi_q, phi_k, call)

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return out if self.conv is None else self.conv.add(out, v, call)

    def macs(self, size: Size) -> int:
        queries, keys = (Blocks(grid, self.blocks).tokens + grid.prefix for grid in (size.grid, size.key_grid))
        d, values, blocks = size.head_dim, size.value_dim, self.blocks**2
        states = keys * d * values + blocks**2 * d * values + queries * d * values
        places = queries - size.grid.prefix
        sums = queries * d + (blocks**2 * d if self.variant == "paper" else places * (blocks + d))
        local = self.conv.macs(size) if self.conv is not None else 0
        return size.batch * size.heads * (states + sums) + local


def nearness(side: int) -> Tensor:
    """1 − distance/longest between the middles of blocks, columns summing to one."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).reshape(-1, 2).double()
    distance = torch.cdist(places, places)
    weights = 1 - distance / distance.max().clamp_min(1.0)
    return (weights / weights.sum(0, keepdim=True)).float()
