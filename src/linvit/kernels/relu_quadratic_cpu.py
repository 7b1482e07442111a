"""ReLU-quadratic attention on the CPU: plain PyTorch over tiles of queries and keys, which stay in the cache.

Memory is linear in the tokens, and there is no N×N matrix to write and read again. The backward pass recomputes the
scores, as on the GPU. Matrix products are nearly all of the time, so what counts is that little else is done: they read
the heads of an image where they lie, scale what they write, and write it where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from linvit.kernels.linear_launch import rows_like

ROWS, COLUMNS = 512, 1024  # of a tile of scores, at most
TILE_NUMBERS = 2**18  # scores of heads that share a tile: 1 MiB of float32
SMALL_IMAGE = 2**16  # scores below which several images are copied together: calls would take longer than products


def parts(count: int, most: int, multiple: int = 1) -> list[slice]:
    """Slices of about the same size, `most` at most; multiples of something where there are several."""
    size = -(-count // -(-count // most))
    if size < count:
        size = -(-size // multiple) * multiple
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def images(q: Tensor, k: Tensor) -> list[slice]:
    """Groups of images that are taken together."""
    scores = q.shape[1] * q.shape[2] * k.shape[2]
    batch, together = q.shape[0], max(1, SMALL_IMAGE // scores)
    return [slice(start, min(batch, start + together)) for start in range(0, batch, together)]


def heads_of(x: Tensor, b: slice, keep: Tensor | None = None) -> Tensor:
    """`(images · heads, tokens, channels)` in float32 at least, rows that are not kept zeroed; a view of one image."""
    x = x[b.start] if b.stop == b.start + 1 else x[b].flatten(0, 1)
    if keep is not None:
        x = torch.where(keep, x, torch.zeros((), dtype=x.dtype))
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def kept(mask: Tensor | None, b: slice, heads: int) -> Tensor | None:
    return None if mask is None else mask[b].repeat_interleave(heads, 0)[:, :, None]


class Target:
    """Where one group's result goes: the memory itself where it can be written in place, else copied at the end."""

    def __init__(self, whole: Tensor, b: slice, like: Tensor) -> None:
        self.later = None
        if b.stop == b.start + 1 and whole.dtype == like.dtype:
            self.tensor = whole[b.start]
        else:
            self.later = whole[b]
            self.tensor = like.new_empty(self.later.shape[0] * whole.shape[1], *whole.shape[2:])

    def finish(self) -> None:
        if self.later is not None:
            self.later.copy_(self.tensor.unflatten(0, self.later.shape[:2]))


def one_tile(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] <= ROWS and k.shape[1] <= COLUMNS and len(q) * q.shape[1] * k.shape[1] <= TILE_NUMBERS


def tiles(q: Tensor, k: Tensor, buffers: int) -> Iterator[tuple[slice, slice, slice, list[Tensor]]]:
    """Heads, rows and columns of each tile, and buffers of its size.

    Rows of a buffer begin at whole cache lines, but not a power of two apart: those would share few sets of the cache.
    """
    rows, columns = parts(q.shape[1], ROWS, 16), parts(k.shape[1], COLUMNS, 16)
    height, width = rows[0].stop, columns[0].stop
    groups = parts(q.shape[0], max(1, TILE_NUMBERS // (height * width)))
    whole = q.new_empty(buffers, groups[0].stop, height, -(-width // 16) * 16 + 16)
    for h in groups:
        for m in rows:
            for n in columns:
                yield h, m, n, list(whole[:, : h.stop - h.start, : m.stop - m.start, : n.stop - n.start])


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    out = rows_like(v, q.shape[2])
    for b in images(q, k):
        keep = kept(mask, b, q.shape[1])
        queries, keys, values = heads_of(q, b), heads_of(k, b, keep), heads_of(v, b, keep)
        alpha, factor = factors(k, mask, b)
        target = Target(out, b, queries)
        if one_tile(queries, keys):
            target.tensor.baddbmm_(torch.bmm(queries, keys.mT).relu_(), values, beta=0, alpha=alpha)
        else:
            for h, m, n, (weight,) in tiles(queries, keys, 1):
                torch.bmm(queries[h, m], keys[h, n].mT, out=weight).relu_()
                target.tensor[h, m].baddbmm_(weight, values[h, n], beta=float(n.start > 0), alpha=alpha)
        if factor is not None:
            target.tensor.mul_(factor)
        target.finish()
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    for b in images(q, k):
        keep = kept(mask, b, q.shape[1])
        queries, keys, values = heads_of(q, b), heads_of(k, b, keep), heads_of(v, b, keep)
        alpha, factor = factors(k, mask, b)
        g = heads_of(grad, b) if factor is None else heads_of(grad, b) * factor
        targets = [Target(d, b, queries) for d in (dq, dk, dv)]
        d_queries, d_keys, d_values = (target.tensor for target in targets)
        if one_tile(queries, keys):
            weight, d_weight = queries.new_empty(2, len(queries), queries.shape[1], keys.shape[1])
            add_gradients(queries, keys, values, g, d_queries, d_keys, d_values, weight, d_weight, 0, 0, alpha)
        else:
            for h, m, n, (weight, d_weight) in tiles(queries, keys, 2):
                inputs = (queries[h, m], keys[h, n], values[h, n], g[h, m])
                outputs = (d_queries[h, m], d_keys[h, n], d_values[h, n])
                add_gradients(*inputs, *outputs, weight, d_weight, int(n.start > 0), int(m.start > 0), alpha)
        for target in targets:
            target.finish()


def add_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, weight: Tensor, d_weight: Tensor,
    onward: int, again: int, alpha: float,
) -> None:  # fmt: skip
    """One tile's share of the gradients: the first one of its rows unless `onward`, of its columns unless `again`."""
    torch.bmm(q, k.mT, out=weight).relu_()
    dv.baddbmm_(weight.mT, g, beta=again, alpha=alpha)
    torch.bmm(g, v.mT, out=d_weight)
    torch.ops.aten.threshold_backward.grad_input(d_weight, weight, 0, grad_input=d_weight)
    dk.baddbmm_(d_weight.mT, q, beta=again, alpha=alpha)
    dq.baddbmm_(d_weight, k, beta=onward, alpha=alpha)


def factors(k: Tensor, mask: Tensor | None, b: slice) -> tuple[float, Tensor | None]:
    """1 / (√d · keys that take part): a number, and under a mask what it lacks for each, `(images · heads, 1, 1)`."""
    scale = k.shape[-1] ** -0.5
    if mask is None:
        return float(scale / k.shape[2]), None
    dtype = torch.float32 if k.dtype in (torch.float16, torch.bfloat16) else k.dtype
    return float(scale), (1 / mask[b].sum(-1).clamp_min(1).to(dtype)).repeat_interleave(k.shape[1])[:, None, None]
