"""ReLU-quadratic attention on the CPU: plain PyTorch over tiles of queries and keys, which stay in the cache.

Memory is linear in the tokens, and there is no N×N matrix to write and read again. The backward pass recomputes the
scores, as on the GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linvit.kernels.linear_launch import rows_like

TILE_NUMBERS = 2**19  # scores of one tile: 2 MiB of float32


def cut(q: Tensor, keys: int) -> tuple[list[slice], int]:
    """Groups of images, and rows of a square tile, so that the scores of a tile and a group stay in the cache."""
    batch, heads, queries, _ = q.shape
    rows = max(64, min(512, 1 << int(math.log2(TILE_NUMBERS / heads) / 2)))
    images = max(1, TILE_NUMBERS // (heads * min(rows, queries) * min(rows, keys)))
    return parts(batch, images), rows


def parts(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def lifted(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """In float32 at least, dense, with the rows that are not kept zeroed."""
    x = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).contiguous()
    return x if keep is None else torch.where(keep, x, torch.zeros((), dtype=x.dtype))


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    keep = None if mask is None else mask[:, None, :, None]
    groups, rows = cut(q, k.shape[2])
    out = rows_like(v, q.shape[2])
    k, v = lifted(k, keep), lifted(v, keep)
    factor = factors(k, mask)
    for b in groups:
        keys, values = k[b].flatten(0, 1).transpose(-2, -1), v[b].flatten(0, 1)
        for m in parts(q.shape[2], rows):
            q_tile = (lifted(q[b, :, m]) * factor[b]).flatten(0, 1)
            total = v.new_empty(*q_tile.shape[:2], v.shape[3])
            for n in parts(v.shape[2], rows):
                total.baddbmm_(torch.bmm(q_tile, keys[:, :, n]).relu_(), values[:, n], beta=float(n.start > 0))
            out[b, :, m] = total.unflatten(0, (-1, q.shape[1]))
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    keep = None if mask is None else mask[:, None, :, None]
    groups, rows = cut(q, k.shape[2])
    k, v = lifted(k, keep), lifted(v, keep)
    factor, heads = factors(k, mask), (-1, q.shape[1])
    for b in groups:
        keys, values = k[b].flatten(0, 1), v[b].flatten(0, 1)
        d_keys, d_values = torch.empty_like(keys), torch.empty_like(values)
        for m in parts(q.shape[2], rows):
            q_tile = (lifted(q[b, :, m]) * factor[b]).flatten(0, 1)
            g_tile = lifted(grad[b, :, m]).flatten(0, 1)
            total = torch.empty_like(q_tile)
            for n in parts(k.shape[2], rows):
                weight = torch.bmm(q_tile, keys[:, n].transpose(-2, -1)).relu_()
                d_values[:, n].baddbmm_(weight.transpose(-2, -1), g_tile, beta=float(m.start > 0))
                d_weight = torch.bmm(g_tile, values[:, n].transpose(-2, -1))
                torch.ops.aten.threshold_backward.grad_input(d_weight, weight, 0, grad_input=d_weight)
                d_keys[:, n].baddbmm_(d_weight.transpose(-2, -1), q_tile, beta=float(m.start > 0))
                total.baddbmm_(d_weight, keys[:, n], beta=float(n.start > 0))
            dq[b, :, m] = total.unflatten(0, heads) * factor[b]
        dk[b], dv[b] = d_keys.unflatten(0, heads), d_values.unflatten(0, heads)


def factors(k: Tensor, mask: Tensor | None) -> Tensor:
    """1 / (√d · keys that take part) of each image, `(batch, 1, 1, 1)`."""
    scale = k.shape[-1] ** -0.5
    if mask is None:
        return k.new_full((k.shape[0], 1, 1, 1), scale / k.shape[2])
    return scale / mask.sum(-1).clamp_min(1).to(k.dtype)[:, None, None, None]
