"""Launching ReLU-quadratic attention's kernels: a small rule chooses the block sizes, nothing is tuned at run time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linvit.kernels.fused import Launch, Strides, launch_cache, power_of_two, processors, rows_like, signature_of

MANY = 2048  # tokens from which the wider of two good blocks wins; below, less is lost at the ragged end
WAVES = 4  # programs for each processor that are enough to keep it busy


@dataclass(frozen=True)
class Tiles:
    """Rows of the block a program owns, rows of the blocks it walks over, warps and pipeline stages."""

    own: int
    walk: int
    warps: int
    stages: int


def tiles(which: str, width: int, itemsize: int, tokens: int, few: bool) -> Tiles:
    """The rule for block sizes; `few` is for calls whose larger blocks would not fill the chip, or lack registers.

    Measured on an H200 in bfloat16. What counts is that accumulators stay in registers: 64 rows to a warpgroup.
    """
    if itemsize > 2:
        return Tiles(64, 32, 4, 2) if width <= 64 else Tiles(32, 32, 4, 1)
    if width > 128:
        return Tiles(64, 32, 4, 2) if which != "keys" else Tiles(64, 32, 8, 2)
    if which == "bias":
        return Tiles(64, 32, 4, 2)
    if width > 64:
        wide = {"forward": Tiles(64, 64, 4, 3), "keys": Tiles(64, 32, 4, 3), "queries": Tiles(128, 32, 8, 3)}
        return wide[which]
    if which == "forward":
        return Tiles(128 if not few and (width < 64 or tokens >= MANY) else 64, 64, 4, 3)
    if which == "keys" and width == 64:
        return Tiles(64, 64 if tokens >= MANY else 32, 4, 4)
    return Tiles(64, 64, 4, 3)


@launch_cache
def prepare(
    which: str, signature: tuple[Any, ...], masked: bool, biased: torch.dtype | None, strides: Strides,
    repeats: int = 1, share: int = 1,
) -> Launch:  # fmt: skip
    """The launch of one kernel, "forward", "keys", "queries" or "bias"; `strides` are of its other tensors, in order.

    `biased` is the bias's type, `repeats` how many images have the same one, of which a program of the last kernel adds
    up `share`.
    """
    import triton.language as tl

    from linvit.kernels.relu_quadratic import kernels

    q, _, v, q_strides, k_strides, v_strides, dtype, *_, device, _, _ = signature
    (batch, heads, queries, head_dim), (keys, value_dim) = q, v[2:]
    width, value_width = (max(16, power_of_two(n)) for n in (head_dim, value_dim))
    tokens = keys if which == "keys" else queries
    few = biased is not None or batch * heads * -(-tokens // 128) < 2 * processors(device)
    t = tiles(which, max(width, value_width), dtype.itemsize, tokens, few)
    m, n = (t.walk, t.own) if which == "keys" else (t.own, t.walk)
    scale = head_dim**-0.5
    # The power of two below 1/√d, so that scaling is exact; what is left of 1/√d joins the factor at the end.
    prescale = 2.0 ** math.floor(math.log2(scale)) if dtype == torch.float16 else 1.0
    # With a bias scores are scaled before the ReLU, so what they weigh is not scaled after it.
    mean = 1.0 / (1 if masked else keys)
    weighed = mean if biased else scale * mean / prescale
    numbers: tuple[Any, ...] = (heads, queries, keys)
    numbers += {
        "forward": (prescale, scale / prescale, weighed),
        "keys": (prescale, scale / prescale, scale * mean, weighed),
        "queries": (scale, scale * mean),
        "bias": (repeats, share, scale, mean),
    }[which]
    kinds = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    kind = tl.float32 if device.type == "cpu" else kinds[dtype]  # the interpreter cannot multiply bfloat16
    constants: tuple[Any, ...] = (head_dim, value_dim, width, value_width, m, n, kind)
    constants += ("tf32x3" if dtype == torch.float32 else "tf32",)
    if which in ("forward", "keys"):
        constants += (prescale != 1,)
    kernel = {
        "forward": kernels.forward_kernel,
        "keys": kernels.key_gradient_kernel,
        "queries": kernels.query_gradient_kernel,
        "bias": kernels.bias_gradient_kernel,
    }[which]
    programs = batch * heads * -(-tokens // t.own)
    if which == "bias":
        programs = batch // repeats * -(-repeats // share) * heads * -(-queries // m) * -(-keys // n)
    grid = (programs, 1, 1)
    values = (*q_strides, *k_strides, *v_strides, *strides, *numbers, *constants)
    return Launch(kernel, grid, values, num_warps=t.warps, num_stages=t.stages)


def inverse_of(mask: Tensor | None) -> Tensor | None:
    """One over the keys that take part, of each image."""
    return None if mask is None else 1 / mask.sum(-1).clamp_min(1).float()


def extras(mask: Tensor | None, bias: Tensor | None) -> tuple[int, ...]:
    """Strides of what need not be there, and after how many images a bias comes again; a dimension it shares has no
    stride."""
    strides = (0, 0) if mask is None else mask.stride()
    if bias is None:
        return (*strides, 0, 0, 0, 0, 1)
    shared = (stride if size > 1 else 0 for stride, size in zip(bias.stride(), bias.shape, strict=True))
    return *strides, *shared, len(bias)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, signature: tuple[Any, ...]
) -> Tensor:
    """The output as a view of `(batch, queries, heads, value_dim)`, which is what the output projection reads."""
    out = rows_like(v, q.shape[2])
    kinds = (mask is not None, None if bias is None else bias.dtype)
    launch = prepare("forward", signature, *kinds, out.stride()[:3] + extras(mask, bias))
    launch(q, k, v, out, mask, inverse_of(mask), bias)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, mask: Tensor | None,
    bias: Tensor | None = None, wanted: bool = False,
) -> Tensor | None:  # fmt: skip
    """Writes dq, dk and dv, whose last dimension is dense, and returns the bias's gradient where that is wanted."""
    signature, inverse, others = signature_of(q, k, v), inverse_of(mask), extras(mask, bias)
    kinds = (mask is not None, None if bias is None else bias.dtype)
    launch = prepare("keys", signature, *kinds, grad.stride() + dk.stride()[:3] + dv.stride()[:3] + others)
    launch(q, k, v, grad, dk, dv, mask, inverse, bias)
    launch = prepare("queries", signature, *kinds, grad.stride() + dq.stride()[:3] + others)
    launch(q, k, v, grad, dq, mask, inverse, bias)
    if bias is None or not wanted:
        return None
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    repeats = batch // len(bias)
    share = share_of(repeats, len(bias) * heads * -(-queries // 64) * -(-keys // 32), processors(q.device))
    shape = (len(bias), -(-repeats // share), heads, queries, keys)
    parts = torch.empty(shape, dtype=torch.float32, device=q.device)
    launch = prepare("bias", signature, *kinds, grad.stride() + others, repeats, share)
    launch(q, k, v, grad, bias, mask, inverse, parts)
    return parts.sum(1).sum_to_size(bias.shape).to(bias.dtype)


def share_of(images: int, tiles: int, processors: int) -> int:
    """How many images that share a bias a program adds up: the most that leaves programs enough. Each share takes
    memory for its sum, and the sums are added in the end."""
    return -(-images // min(images, -(-WAVES * processors // tiles)))
