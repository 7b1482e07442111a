"""Rotary position: pairs of channels turned by angles that grow with a token's place.

A product of a turned query and a turned key knows how far they are apart and not where they are. That holds for q·k
itself, and for φ(q)·φ(k) where the features are turned, not q and k before them:

    out = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j)

The normaliser stays unturned: turned features may have products below zero, and a row sum of them may vanish.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.attention.shapes import TokenGrid
from linvit.errors import LinvitError


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the last tokens, `(…, tokens, head_dim)`; tokens before them, as the class token, stay.

    Channels come in `blocks`, and the first half of a block is paired with its second: one block is Llama's and
    DINOv3's layout, blocks of two channels are RoFormer's and EVA's, where neighbours are paired.
    """

    cos: Tensor
    sin: Tensor
    blocks: int = 1

    @classmethod
    def axial(cls, grid: TokenGrid, head_dim: int, base: float = 100.0, dtype: torch.dtype = torch.float32) -> "Rotary":
        """Half of a head turned by a token's row and half by its column, neighbouring channels paired."""
        if head_dim % 4:
            raise LinvitError(f"axial rotary position needs head_dim to be a multiple of 4, got {head_dim}")
        speeds = base ** -torch.arange(0, 1, 4 / head_dim, dtype=torch.float64)
        rows = torch.arange(grid.height).repeat_interleave(grid.width)
        columns = torch.arange(grid.width).repeat(grid.height)
        angles = torch.cat((rows[:, None] * speeds, columns[:, None] * speeds), dim=1).repeat_interleave(2, dim=1)
        return cls(angles.cos().to(dtype), angles.sin().to(dtype), head_dim // 2)

    @property
    def head_dim(self) -> int:
        return self.cos.shape[-1]

    @property
    def turn(self) -> str:
        """What the fused kernel calls the pairs' layout, empty where it has none."""
        width = self.head_dim
        if self.blocks * 2 == width:
            return "pairs"
        return "halves" if self.blocks == 1 and width & (width - 1) == 0 else ""

    def check(self, q: Tensor, k: Tensor) -> None:
        """An error where these angles are not those of q and k."""
        if self.head_dim != q.shape[-1] or self.cos.shape[-2] > q.shape[-2]:
            of = f"{self.cos.shape[-2]} tokens of {self.head_dim} channels"
            raise LinvitError(f"rotary position of {of} does not fit q of {q.shape[-2]} tokens of {q.shape[-1]}")
        if q.shape[-2] != k.shape[-2]:
            raise LinvitError(f"rotary position needs as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}")

    def __call__(self, x: Tensor) -> Tensor:
        """`x`, `(batch, heads, tokens, head_dim)`, turned."""
        tokens = self.cos.shape[-2]
        first, last = x.split((x.shape[-2] - tokens, tokens), dim=-2)
        turned = (last * self.cos + self.partners(last) * self.sin).to(x.dtype)
        return torch.cat((first, turned), dim=-2) if first.shape[-2] else turned

    def partners(self, x: Tensor) -> Tensor:
        """Each channel's partner, that of a first half negated. No tensor has more than five dimensions: Core ML takes
        no more."""
        if self.blocks * 2 == x.shape[-1]:
            one, other = x.unflatten(-1, (self.blocks, 2)).unbind(-1)
            return torch.stack((-other, one), dim=-1).flatten(-2)
        halves = x.chunk(2 * self.blocks, dim=-1)
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return torch.cat([half for one, other in pairs for half in (-other, one)], dim=-1)

    def features(self, phi: Tensor) -> Tensor:
        """Features turned: each whole head's width of them alike, what is left over (a constant feature) not at all."""
        copies = phi.shape[-1] // self.head_dim
        own, constant = phi[..., : copies * self.head_dim], phi[..., copies * self.head_dim :]
        cos, sin = (torch.cat([angle] * copies, dim=-1) for angle in (self.cos, self.sin))
        if cos.ndim > 2 and 1 < cos.shape[-3] < phi.shape[1]:  # angles of each head, which is cut into several
            cos, sin = (angle.repeat_interleave(phi.shape[1] // cos.shape[-3], dim=-3) for angle in (cos, sin))
        turned = Rotary(cos, sin, self.blocks * copies)(own)
        return torch.cat((turned, constant), dim=-1) if constant.shape[-1] else turned
