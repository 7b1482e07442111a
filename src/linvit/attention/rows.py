"""Rows of a mechanism's implied map without the map, in memory linear in the tokens: for pictures of large images.

As the core is linear in v, weighted rows are the gradient of its weighted outputs by v. A quadratic mechanism would
make its map on the way; its queries stand by themselves, so it is asked for some of them at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linvit.attention.mechanism import Call, Mechanism, TokenGrid, lift
from linvit.attention.precision import outside_autocast

AT_ONCE = 2**21  # entries of a quadratic map that are there at a time


def pull(
    mechanism: Mechanism,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    width: int,
    grid: TokenGrid | None = None,
    **given: Any,
) -> Tensor:
    """`weights · map`, `(batch, queries)` to `(batch, heads, keys, width)`; one on a single query takes its row.

    The last axis is the channels of v, `width` of them: where a mechanism regroups these into heads of its own, each
    has its own map. `given` is what `Mechanism.map` takes.
    """
    q, k, call, nothing = mechanism.entered(q, k, grid, **given)
    weights = lift(weights).to(q.dtype)
    with outside_autocast(q.device):
        if mechanism.capabilities.linear:
            found = by_gradient(mechanism, weights, q, k, width, call)
        else:
            found = k.new_zeros(k.shape[:3])
            for some, rows in some_rows(mechanism, q, k, call, weights.any(0).nonzero()[:, 0]):
                found += (weights[:, None, None, some] @ rows).squeeze(2)
            found = found[..., None].expand(*found.shape, width)
    return found if nothing is None else found.masked_fill(nothing, 0.0)


def each_row(
    mechanism: Mechanism, queries: Sequence[int], q: Tensor, k: Tensor, width: int, grid: TokenGrid | None, **given: Any
) -> Tensor:
    """`(batch, heads, queries, keys)`: the rows of some queries, mean over a head's channels, what they share
    computed once."""
    entered = mechanism.entered(q, k, grid, **given)
    if not mechanism.capabilities.linear or entered[3] is not None:
        picks = torch.zeros(len(queries), q.shape[2], device=q.device)
        picks[range(len(queries)), list(queries)] = 1.0
        found = [pull(mechanism, one.expand(q.shape[0], -1), q, k, width, grid, **given).mean(-1) for one in picks]
        return torch.stack(found, dim=2)
    q, k, call, _ = entered
    with outside_autocast(q.device), torch.enable_grad():
        v = k.new_zeros(*k.shape[:3], width).requires_grad_()
        out = mechanism.core(q.detach(), k.detach(), v, call)
        found = []
        for query in queries:
            picked = torch.zeros_like(out)
            picked[:, :, query] = 1.0
            found.append(torch.autograd.grad(out, v, picked, retain_graph=True)[0].mean(-1))
    return torch.stack(found, dim=2)


def by_gradient(mechanism: Mechanism, weights: Tensor, q: Tensor, k: Tensor, width: int, call: Call) -> Tensor:
    with torch.enable_grad():
        v = k.new_zeros(*k.shape[:3], width).requires_grad_()
        out = mechanism.core(q.detach(), k.detach(), v, call)
        return torch.autograd.grad(out, v, weights[:, None, :, None].expand_as(out))[0]


@torch.no_grad()
def row_sums(
    mechanism: Mechanism, q: Tensor, k: Tensor, width: int, grid: TokenGrid | None = None, **given: Any
) -> Tensor:
    """`(batch, queries)`: the sums of the map's rows, the mean over its heads; `width` is that of v."""
    q, k, call, nothing = mechanism.entered(q, k, grid, **given)
    with outside_autocast(q.device):
        if mechanism.capabilities.linear:
            found = mechanism.core(q, k, k.new_ones(*k.shape[:3], width), call).mean((1, 3))
        else:
            everyone = torch.arange(q.shape[2], device=q.device)
            parts = [rows.sum(-1).mean(1) for _, rows in some_rows(mechanism, q, k, call, everyone)]
            found = torch.cat(parts, dim=1)
    return found if nothing is None else found.masked_fill(nothing[:, :, 0, 0], 0.0)


@torch.no_grad()
def some_rows(
    mechanism: Mechanism, q: Tensor, k: Tensor, call: Call, queries: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows `(batch, heads, some, keys)` of these queries of a quadratic mechanism, some at a time."""
    bias = call.bias
    for some in queries.split(max(1, AT_ONCE // max(1, k.shape[0] * k.shape[1] * k.shape[2]))):
        near = bias if bias is None or bias.shape[2] == 1 else bias[:, :, some]
        yield some, mechanism.implied_map(q[:, :, some], k, replace(call, grid=TokenGrid.line(len(some)), bias=near))
