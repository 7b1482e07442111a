"""Hiera's `MaskUnitAttention`: inside mask units in the early stages, over the whole picture later, with max-pooled
queries where a stage begins.

Exact for softmax, at the image size the model was built for (Hiera's own unrolling has no other). Hiera keeps the
tokens of a unit in the order of its pooling, not row by row; mechanisms that look at the grid or at neighbours get them
row by row. Layers with pooled queries need a mechanism that takes fewer queries than keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from timm.models.hiera import Hiera, MaskUnitAttention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import POOLED_QUERIES, Ask, Host, unpack

Strides = tuple[tuple[int, int], ...]


class HieraHost(Host, MaskUnitAttention):
    original = MaskUnitAttention
    strides: Strides = ()  # pooling still to come, each step of which is an outer axis of the tokens
    units: tuple[int, int] = (1, 1)  # mask units of the picture

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.heads, module.head_dim, dim=module.dim)

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([POOLED_QUERIES] if module.q_stride > 1 else [])

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        strides, units = next(where for attn, where in stages(image.owner) if attn.qkv is module.qkv)
        return layout(strides, (1, 1) if module.use_mask_unit_attn else units)[0]

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for owner in model.modules():
            if isinstance(owner, Hiera):
                for attn, (strides, units) in stages(owner):
                    attn.strides, attn.units = strides, units

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        size = self.q_stride * self.window_size if self.use_mask_unit_attn else tokens
        units = tokens // size
        x = x.reshape(batch, size, units, -1).transpose(1, 2).flatten(0, 1)
        q, k, v = unpack(self.qkv(x), 3, self.heads)
        if self.q_stride > 1:
            q = q.unflatten(2, (self.q_stride, -1)).amax(2)
        out = self.project_out(self._attend(q, k, v, x), q)
        return out.unflatten(0, (batch, units)).transpose(1, 2).flatten(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        units = (1, 1) if self.use_mask_unit_attn else self.units
        key_grid, key_order = layout(self.strides, units)
        if self.mechanism.capabilities.equivariant or key_grid.tokens != k.shape[2]:  # masked units leave no picture
            return self.attend(q, k, v, None, x=x)
        grid, order = layout(self.strides[1:], units) if self.q_stride > 1 else (key_grid, key_order)
        order, key_order = order.to(q.device), key_order.to(q.device)
        k, v, x = k[:, :, key_order], v[:, :, key_order], x[:, key_order]
        out = self.attend(q[:, :, order], k, v, grid, key_grid=key_grid, x=x)
        return out[:, :, order.argsort()]


def stages(model: Hiera) -> Iterator[tuple[Any, tuple[Strides, tuple[int, int]]]]:
    """Each attention of the model with the pooling that lies ahead of it and its mask units."""
    left = [(rows, columns) for rows, columns in model.unroll.schedule]
    height, width = model.unroll.size
    units = (height // prod(s[0] for s in left), width // prod(s[1] for s in left))
    block: Any
    for block in model.blocks:
        yield block.attn, (tuple(left), units)
        if block.attn.q_stride > 1:
            left = left[1:]


def layout(strides: Strides, units: tuple[int, int]) -> tuple[TokenGrid, Tensor]:
    """The grid of tokens with these outer axes and, row by row, the place where Hiera keeps each."""
    axes = [n for stride in (*strides, units) for n in stride]
    order = torch.arange(prod(axes)).reshape(axes)
    order = order.permute(*range(len(axes) - 2, -1, -2), *range(len(axes) - 1, 0, -2)).flatten()
    return TokenGrid(prod(axes[0::2]), prod(axes[1::2])), order
