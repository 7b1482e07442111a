"""Multi-scale deformable attention (Zhu et al., Deformable DETR, 2021) in plain PyTorch.

A query looks at a few points of each map, near its own place: it says where (offsets) and how much (weights), and the
values there are read by bilinear interpolation. Time and memory are linear in the queries.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.precision import lift, outside_autocast
from linvit.errors import LinvitError

Shapes = Sequence[tuple[int, int]]


def sample(value: Tensor, shapes: Shapes, places: Tensor, weights: Tensor) -> Tensor:
    """What queries read from several maps: `(batch, queries, heads · channels)`.

    `value` is `(batch, tokens, heads, channels)`, the maps of these `shapes` one behind the other. `places` are
    `(batch, queries, heads, maps, points, 2)`, x and y from 0 to 1 over each map; `weights` go without the last axis.
    Outside of a map there are zeros.
    """
    batch, queries, heads, _, points, _ = places.shape
    grids = (2 * places - 1).permute(3, 0, 2, 1, 4, 5).flatten(1, 2)  # maps, batch · heads, queries, points, 2
    parts = value.split([height * width for height, width in shapes], dim=1)
    read = []
    for part, grid, (height, width) in zip(parts, grids, shapes, strict=True):
        picture = part.permute(0, 2, 3, 1).reshape(batch * heads, -1, height, width)
        read.append(F.grid_sample(picture, grid, align_corners=False))
    flat = weights.transpose(1, 2).reshape(batch * heads, 1, queries, len(shapes) * points)
    out = (torch.cat(read, dim=-1) * flat).sum(-1)
    return out.reshape(batch, -1, queries).transpose(1, 2)


class DeformableAttention(nn.Module):
    """Queries over `levels` maps. `ratio` is the width of the values as a share of `dim`.

    It begins with every query looking evenly at `points` steps in as many directions as there are heads.
    """

    def __init__(self, dim: int, levels: int, heads: int, points: int = 4, ratio: float = 1.0) -> None:
        super().__init__()
        width = int(dim * ratio)
        if width % heads:
            raise LinvitError(f"values of {width} channels cannot be split into {heads} heads of deformable attention")
        self.levels, self.heads, self.points = levels, heads, points
        self.offsets = nn.Linear(dim, heads * levels * points * 2)
        self.weights = nn.Linear(dim, heads * levels * points)
        self.value = nn.Linear(dim, width)
        self.out = nn.Linear(width, dim)
        self.begin()

    def begin(self) -> None:
        """The weights to begin with."""
        for zeroed in (self.offsets.weight, self.weights.weight, self.weights.bias, self.value.bias, self.out.bias):
            nn.init.zeros_(zeroed)
        nn.init.xavier_uniform_(self.value.weight)
        nn.init.xavier_uniform_(self.out.weight)
        angle = torch.arange(self.heads, dtype=torch.float32) * (2 * math.pi / self.heads)
        ring = torch.stack((angle.cos(), angle.sin()), dim=-1)
        ring = ring / ring.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.points + 1, dtype=torch.float32)[:, None]
        bias = (ring[:, None, None] * steps).expand(-1, self.levels, -1, -1)
        with torch.no_grad():
            self.offsets.bias.copy_(bias.flatten())

    def forward(self, query: Tensor, references: Tensor, tokens: Tensor, shapes: Shapes) -> Tensor:
        """`query` is `(batch, queries, dim)`; `references`, their own places on each map, `(queries, maps, 2)`, x and y
        from 0 to 1; `tokens` the maps of these `shapes` one behind the other, `(batch, tokens, dim)`."""
        split = (self.heads, self.levels, self.points)
        offsets = self.offsets(query).unflatten(-1, (*split, 2))
        weights = self.weights(query).unflatten(-1, (self.heads, -1)).softmax(-1).unflatten(-1, split[1:])
        value = self.value(tokens).unflatten(-1, (self.heads, -1))
        with outside_autocast(query.device):  # half precision is too coarse for places
            x, y = lift(offsets).unbind(-1)
            x = torch.stack([x[:, :, :, level] / width for level, (_, width) in enumerate(shapes)], dim=3)
            y = torch.stack([y[:, :, :, level] / height for level, (height, _) in enumerate(shapes)], dim=3)
            places = references[:, None, :, None] + torch.stack((x, y), dim=-1)
            out = sample(lift(value), shapes, places, lift(weights))
        return self.out(out.to(value.dtype))
