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


def tile_rows(heads: int) -> int:
    """Rows of a square tile whose scores, of all heads together, stay in the cache."""
    return max(64, min(512, 1 << int(math.log2(TILE_NUMBERS / heads) / 2)))


def parts(tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def lifted(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """In float32 at least, dense, with the rows that are not kept zeroed."""
    x = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).contiguous()
    return x if keep is None else torch.where(keep, x, torch.zeros((), dtype=x.dtype))


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    keep = None if mask is None else mask[:, None, :, None]
    factor, rows = factors(q, k, mask), tile_rows(q.shape[1])
    out = rows_like(v, q.shape[2])
    k, v = lifted(k, keep).transpose(-2, -1), lifted(v, keep)
    for b in range(q.shape[0]):
        for m in parts(q.shape[2], rows):
            q_tile = lifted(q[b, :, m]) * factor[b]
            total = v.new_empty(*q_tile.shape[:2], v.shape[3])
            for n in parts(v.shape[2], rows):
                total.baddbmm_(torch.bmm(q_tile, k[b, :, :, n]).relu_(), v[b, :, n], beta=float(n.start > 0))
            out[b, :, m] = total
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    keep = None if mask is None else mask[:, None, :, None]
    factor, rows = factors(q, k, mask), tile_rows(q.shape[1])
    k, v = lifted(k, keep), lifted(v, keep)
    for b in range(q.shape[0]):
        dk_total, dv_total = torch.empty_like(k[b]), torch.empty_like(v[b])
        for m in parts(q.shape[2], rows):
            q_tile, g_tile = lifted(q[b, :, m]) * factor[b], lifted(grad[b, :, m])
            total = torch.empty_like(q_tile)
            for n in parts(k.shape[2], rows):
                k_tile, v_tile = k[b, :, n], v[b, :, n]
                weight = torch.bmm(q_tile, k_tile.transpose(-2, -1)).relu_()
                dv_total[:, n].baddbmm_(weight.transpose(-2, -1), g_tile, beta=float(m.start > 0))
                d_weight = torch.bmm(g_tile, v_tile.transpose(-2, -1))
                torch.ops.aten.threshold_backward.grad_input(d_weight, weight, 0, grad_input=d_weight)
                dk_total[:, n].baddbmm_(d_weight.transpose(-2, -1), q_tile, beta=float(m.start > 0))
                total.baddbmm_(d_weight, k_tile, beta=float(n.start > 0))
            dq[b, :, m] = total * factor[b]
        dk[b], dv[b] = dk_total, dv_total


def factors(q: Tensor, k: Tensor, mask: Tensor | None) -> list[float]:
    """1 / (√d · keys that take part) of each image."""
    scale = q.shape[-1] ** -0.5
    if mask is None:
        return [scale / max(1, k.shape[2])] * q.shape[0]
    return [scale / max(1, int(count)) for count in mask.sum(-1)]
