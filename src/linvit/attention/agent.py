"""Agent attention (Han et al., ECCV 2024): a few agents collect from all keys and hand out to all queries.

    A   = average pool of the patch queries to a small grid, 7×7 by default
    out = softmax(q · Aᵀ/√d + B2) · ( softmax(A · kᵀ/√d + B1) · v ) + conv3×3(v)

B1 and B2 are sums of a learned 7×7 table, a row and a column bias, all per head and agent, and of a bias per prefix
token. All of them are resized bilinearly to the grid of the call, so a model may change its resolution; the released
code does this for the tables only and fails elsewhere. On the grid it was built for, the row and column biases are used
as they are, as there.

The released DeiT has one class token with a bias of its own, left out of the pooling and of the convolution. More
prefix tokens (registers) get the same treatment, each its own bias (inferred). Under a mask, padded tokens leave the
pooling as well. With pooled keys, v is resized to the queries before the convolution.
"""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Mechanism, Shape, Size, TokenGrid, lift, register
from linvit.attention.local import GridConv
from linvit.attention.options import Range
from linvit.errors import LinvitError

Side = Annotated[int, Range(1, 64)]


@register("agent", paper="Agent Attention")
class Agent(Mechanism):
    capabilities = Capabilities(grid=True, equivariant=False, rotary="products", dynamic=False)
    needs = ("heads", "head_dim", "grid")
    builds_on_grid = True
    examples = ({"agents": 2}, {"agents": (2, 3)})

    def __init__(self, shape: Shape, *, agents: Side | tuple[Side, Side] = 7) -> None:
        super().__init__(shape)
        height, width = (agents, agents) if isinstance(agents, int) else agents
        self.agents = TokenGrid(height, width)
        self.key_bias = AgentBias(shape, self.agents.patches)
        self.query_bias = AgentBias(shape, self.agents.patches)
        self.local = GridConv((shape.heads or 1) * shape.values, 3)

    def pool(self, q: Tensor, call: Call) -> Tensor:
        """The agents, `(batch, heads, agents, head_dim)`."""
        grid, side = call.grid, (self.agents.height, self.agents.width)
        picture = grid.to_map(grid.split(q)[1])
        if call.query_mask is None:
            pooled = F.adaptive_avg_pool2d(picture, side)
        else:
            kept = grid.to_map(grid.split(call.query_mask[:, None, :, None].to(q.dtype))[1])
            share = F.adaptive_avg_pool2d(kept, side).clamp_min(1e-6)  # where nothing is kept the agent is zero
            pooled = F.adaptive_avg_pool2d(torch.where(kept > 0, picture, 0.0), side) / share
        return self.agents.from_map(pooled, q.shape[1])

    def collect_and_hand_out(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The two softmaxes: `(batch, heads, agents, keys)` and `(batch, heads, queries, agents)`."""
        agents = self.pool(q, call) * q.shape[-1] ** -0.5
        collect = agents @ k.transpose(-2, -1) + self.key_bias(call.key_grid).to(k.dtype)
        if call.mask is not None:
            collect = collect.masked_fill(~call.mask[:, None, None, :], float("-inf"))
        hand_out = q @ agents.transpose(-2, -1) + self.query_bias(call.grid).to(q.dtype).transpose(-2, -1)
        return collect.softmax(-1), hand_out.softmax(-1)

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        collect, hand_out = self.collect_and_hand_out(q, k, call)
        return hand_out @ (collect @ v)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        collect, hand_out = self.collect_and_hand_out(q, k, call)
        return hand_out @ collect

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.local.add(out, v, call)

    def macs(self, size: Size) -> int:
        tokens = size.queries + size.keys
        softmaxes = size.batch * size.heads * self.agents.patches * tokens * (size.head_dim + size.value_dim)
        return softmaxes + self.local.macs(size)


class AgentBias(nn.Module):
    """The bias between agents and tokens, `(heads, agents, tokens)`, on any grid."""

    def __init__(self, shape: Shape, agents: int) -> None:
        super().__init__()
        assert shape.heads and shape.grid
        grid, heads = shape.grid, shape.heads
        self.table = nn.Parameter(torch.empty(heads, agents, 7, 7))
        self.row = nn.Parameter(torch.empty(heads, agents, grid.height, 1))
        self.column = nn.Parameter(torch.empty(heads, agents, 1, grid.width))
        self.prefix = nn.Parameter(torch.empty(heads, agents, grid.prefix)) if grid.prefix else None
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, grid: TokenGrid) -> Tensor:
        built_for = 0 if self.prefix is None else self.prefix.shape[-1]
        if grid.prefix != built_for:
            raise LinvitError(f"agent was built for {built_for} prefix tokens, the grid has {grid.prefix}")
        patches = (
            resize(self.table, grid.height, grid.width)
            + resize(self.row, grid.height, 1)
            + resize(self.column, 1, grid.width)
        ).flatten(2)
        return patches if self.prefix is None else torch.cat((lift(self.prefix), patches), dim=2)


def resize(table: Tensor, height: int, width: int) -> Tensor:
    if table.shape[-2:] == (height, width):
        return lift(table)
    return F.interpolate(lift(table), (height, width), mode="bilinear", align_corners=False)
