"""ReLU-quadratic attention on the CPU: plain PyTorch over tiles of queries and keys, which stay in the cache.

Memory is linear in the tokens, and there is no N×N matrix to write and read again. The backward pass recomputes the
scores, as on the GPU. Matrix products are nearly all of the time, so what counts is that little else is done: they read
the heads of an image where they lie, scale what they write, and write it where it belongs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from linvit.kernels.fused import rows_like

ROWS, COLUMNS = 512, 1024  # of a tile of scores, at most; rows may be more where columns are few
TILE_NUMBERS = 2**18  # scores that share a tile: 1 MiB of float32
HALF = (torch.float16, torch.bfloat16)


def parts(count: int, most: int, multiple: int = 1) -> list[slice]:
    """Slices of about the same size, `most` at most; multiples of something where there are several."""
    size = -(-count // -(-count // most))
    if size < count:
        size = -(-size // multiple) * multiple
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def image(x: Tensor, number: int, mask: Tensor | None = None) -> Tensor:
    """`(heads, tokens, channels)` of one image in float32 at least, rows that are masked out zeroed."""
    x = x[number]
    if mask is not None:
        x = torch.where(mask[number][:, None], x, torch.zeros((), dtype=x.dtype))
    return x.float() if x.dtype in HALF else x


def target(whole: Tensor, number: int) -> Tensor:
    """Where one image's result goes: the memory itself, or what `finish` copies there."""
    place = whole[number]
    return place.new_empty(place.shape, dtype=torch.float32) if place.dtype in HALF else place


def finish(whole: Tensor, number: int, result: Tensor) -> None:
    if result.dtype != whole.dtype:
        whole[number].copy_(result)


def one_tile(q: Tensor, k: Tensor, buffers: int) -> Tensor | None:
    """Buffers for all scores of an image, where one tile holds them."""
    (heads, rows), columns = q.shape[1:3], k.shape[2]
    if columns > COLUMNS or heads * rows * columns > TILE_NUMBERS:
        return None
    return q.new_empty(buffers, heads, rows, columns, dtype=torch.float32 if q.dtype in HALF else q.dtype)


def tiles(q: Tensor, k: Tensor, buffers: int) -> Iterator[tuple[slice, slice, slice, list[Tensor]]]:
    """Heads, rows and columns of each tile, and buffers of its size.

    Rows of a buffer begin at whole cache lines, but not a power of two apart: those would share few sets of the cache.
    """
    columns = parts(k.shape[1], COLUMNS, 16)
    rows = parts(q.shape[1], max(ROWS, TILE_NUMBERS // columns[0].stop), 16)
    height, width = rows[0].stop, columns[0].stop
    groups = parts(q.shape[0], max(1, TILE_NUMBERS // (height * width)))
    whole = q.new_empty(buffers, groups[0].stop, height, -(-width // 16) * 16 + 16)
    for h in groups:
        for m in rows:
            for n in columns:
                yield h, m, n, list(whole[:, : h.stop - h.start, : m.stop - m.start, : n.stop - n.start])


def bias_of(bias: Tensor | None, number: int, q: Tensor, k: Tensor) -> Tensor | None:
    """`(heads, queries, keys)` of one image, in the scores' type, repeated where it is shared."""
    if bias is None:
        return None
    return bias[number % len(bias)].to(q.dtype).expand(len(q), q.shape[1], k.shape[1])


def scores(q: Tensor, k: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """What the ReLU is taken of, up to the factor 1/√d where there is no bias."""
    if bias is None:
        return torch.bmm(q, k.mT, out=out)
    return torch.baddbmm(bias, q, k.mT, alpha=q.shape[-1] ** -0.5, out=out)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    out, whole = rows_like(v, q.shape[2]), one_tile(q, k, 1)
    for number in range(len(q)):
        queries, keys, values = image(q, number), image(k, number, mask), image(v, number, mask)
        result, alpha = target(out, number), weight_factor(k, number, mask, bias)
        added = bias_of(bias, number, queries, keys)
        if whole is not None:
            weight = scores(queries, keys, added, whole[0]).relu_()
            result.baddbmm_(weight, values, beta=0, alpha=alpha)
        else:
            for h, m, n, (weight,) in tiles(queries, keys, 1):
                scores(queries[h, m], keys[h, n], None if added is None else added[h, m, n], weight).relu_()
                result[h, m].baddbmm_(weight, values[h, n], beta=float(n.start > 0), alpha=alpha)
        finish(out, number, result)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, mask: Tensor | None,
    bias: Tensor | None = None, wanted: bool = False,
) -> Tensor | None:  # fmt: skip
    """Writes dq, dk and dv, and returns the bias's gradient where that is wanted; images that share it are added up."""
    d_bias: Tensor | None = None
    if bias is not None and wanted:
        kind = torch.float32 if q.dtype in HALF else q.dtype
        d_bias = torch.zeros((len(bias), *q.shape[1:3], k.shape[2]), dtype=kind)
    whole = one_tile(q, k, 2)
    for number in range(len(q)):
        queries, keys, values = image(q, number), image(k, number, mask), image(v, number, mask)
        g, alphas = image(grad, number), (factor(k, number, mask), weight_factor(k, number, mask, bias))
        added = bias_of(bias, number, queries, keys)
        d_added = None if d_bias is None else d_bias[number % len(d_bias)]
        d_queries, d_keys, d_values = (target(d, number) for d in (dq, dk, dv))
        if whole is not None:
            weight, d_weight = whole
            outputs = (d_queries, d_keys, d_values)
            add_gradients(queries, keys, values, g, added, *outputs, d_added, weight, d_weight, 0, 0, *alphas)
        else:
            for h, m, n, (weight, d_weight) in tiles(queries, keys, 2):
                of_bias, to_bias = (None if part is None else part[h, m, n] for part in (added, d_added))
                inputs = (queries[h, m], keys[h, n], values[h, n], g[h, m], of_bias)
                outputs = (d_queries[h, m], d_keys[h, n], d_values[h, n])
                again, onward = int(m.start > 0), int(n.start > 0)
                add_gradients(*inputs, *outputs, to_bias, weight, d_weight, onward, again, *alphas)
        if mask is not None and bias is not None:  # a bias gives weight to keys that are masked out
            d_values.masked_fill_(~mask[number][:, None], 0)
        for place, result in ((dq, d_queries), (dk, d_keys), (dv, d_values)):
            finish(place, number, result)
    return None if bias is None or d_bias is None else d_bias.sum_to_size(bias.shape).to(bias.dtype)


def add_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
    d_bias: Tensor | None, weight: Tensor, d_weight: Tensor, onward: int, again: int, alpha: float, weight_alpha: float,
) -> None:  # fmt: skip
    """One tile's share of the gradients: the first one of its rows unless `onward`, of its columns unless `again`."""
    scores(q, k, bias, weight).relu_()
    dv.baddbmm_(weight.mT, g, beta=again, alpha=weight_alpha)
    torch.bmm(g, v.mT, out=d_weight)
    torch.ops.aten.threshold_backward.grad_input(d_weight, weight, 0, grad_input=d_weight)
    dk.baddbmm_(d_weight.mT, q, beta=again, alpha=alpha)
    dq.baddbmm_(d_weight, k, beta=onward, alpha=alpha)
    if d_bias is not None:
        d_bias.add_(d_weight, alpha=weight_alpha)


def factor(k: Tensor, number: int, mask: Tensor | None) -> float:
    """1 / (√d · keys that take part)."""
    keys = k.shape[2] if mask is None else max(1, int(mask[number].sum()))
    return float(k.shape[-1] ** -0.5 / keys)


def weight_factor(k: Tensor, number: int, mask: Tensor | None, bias: Tensor | None) -> float:
    """The same for what weighs values: with a bias, scores have their 1/√d before the ReLU."""
    return factor(k, number, mask) * (1.0 if bias is None else k.shape[-1] ** 0.5)
