"""Fastformer (Wu et al.): additive attention, two pooled vectors in place of any pair of tokens.

    α = softmax_N(score_q(q)/√d)    q_g = Σ α·q    p = q_g ⊙ k
    β = softmax_N(score_k(p)/√d)

    original  k_g = Σ β·p;  out = k_g ⊙ q       scores are Linear(C → heads) with bias over the channels of all heads
    fair      k_g = Σ β·k;  out = k_g ⊙ v       the Fair Comparison's AA: scores by one vector per head, from N(0, 1)

Both add the query after the output projection, which a host does through `after_projection`. The default `original` is
the authors' code: it ties V = Q, so v is not read; the paper's text has a value of its own, as `fair` does. A key mask
drops tokens from both softmaxes (the release adds −10000, here −∞), and both tokens and masks are the same for queries
and keys: pooled keys are refused.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Mechanism, Shape, Size, register
from linvit.errors import LinvitError


@register("fastformer", paper="Fastformer; Fair Comparison (AA)")
class Fastformer(Mechanism):
    capabilities = Capabilities(unequal=False, wide_values=False, map=False)
    variants = ("original", "fair")
    needs = ("heads", "head_dim")

    def __init__(self, shape: Shape, *, variant: str | None = None) -> None:
        super().__init__(shape, variant=variant)
        assert shape.heads and shape.head_dim
        self.original = self.variant == "original"
        score = AllChannels if self.original else PerHead
        self.query_score, self.key_score = (score(shape.heads, shape.head_dim) for _ in range(2))
        self.capabilities = replace(self.capabilities, value=not self.original)

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        global_query = self.pool(q, self.query_score(q), call)
        mixed = global_query * k
        pooled = mixed if self.original else k
        global_key = self.pool(pooled, self.key_score(mixed), call)
        return global_key * (q if self.original else v)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        """In bfloat16 as it comes, every tensor read where it lies.

        The heads are side by side in one matrix product, of which the blocks on the diagonal count, and the global
        query goes into the score's weight, so that q_g ⊙ k is not made.
        """
        if q.dtype != torch.bfloat16:
            return "its faster way is for bfloat16 only"
        rows_q, rows_k = (t.transpose(1, 2).flatten(2) for t in (q, k))
        weight, bias = self.query_score.spread()
        global_query = self.pool_rows(rows_q, rows_q @ weight.to(q.dtype) + bias, call)
        weight, bias = self.key_score.spread()
        weight = weight * global_query.flatten(1).unsqueeze(-1)
        global_key = self.pool_rows(rows_k, rows_k @ weight.to(k.dtype) + bias, call)
        if self.original:
            global_key = global_key * global_query
        return global_key.to(v.dtype).unsqueeze(2) * (q if self.original else v)

    def pool_rows(self, x: Tensor, scores: Tensor, call: Call) -> Tensor:
        """`pool` of `(batch, tokens, heads · head_dim)` by `(batch, tokens, heads)`: `(batch, heads, head_dim)`."""
        heads = scores.shape[-1]
        scores = scores.float() * (x.shape[-1] // heads) ** -0.5
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask.unsqueeze(-1), float("-inf"))
            x = x.masked_fill(~call.mask.unsqueeze(-1), 0.0)
        pooled = (scores.softmax(1).to(x.dtype).transpose(1, 2) @ x).float().unflatten(-1, (heads, -1))
        return pooled.diagonal(dim1=1, dim2=2).transpose(1, 2)

    def pool(self, x: Tensor, scores: Tensor, call: Call) -> Tensor:
        """The average of x over the tokens, weighted by the softmax of `scores`: `(batch, heads, 1, head_dim)`."""
        weights = call.keep(scores * x.shape[-1] ** -0.5, float("-inf")).softmax(-2)
        return weights.transpose(-2, -1) @ call.keep(x)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        raise LinvitError(f"{self.name} gates each token with a vector of them all: it has no map")

    def after_projection(self, out: Tensor, q: Tensor) -> Tensor:
        """`out + q`; q comes as the mechanism got it, `(batch, heads, tokens, head_dim)`."""
        query = q.transpose(1, 2).flatten(2)
        if query.shape != out.shape:
            wide = f"{query.shape[-1]} channels do not fit {out.shape[-1]}"
            raise LinvitError(f"{self.name} adds the query to the projected output: {wide}")
        return out + query.to(out.dtype)

    def macs(self, size: Size) -> int:
        one_score = size.heads if self.original else 1
        return 2 * size.batch * size.heads * size.head_dim * size.keys * (one_score + 1)


class AllChannels(nn.Linear):
    """One score per head from the channels of all heads."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads * head_dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        joined = x.transpose(1, 2).flatten(2)
        scores = F.linear(joined, self.weight.to(x.dtype), self.bias.to(x.dtype))
        return scores.transpose(1, 2).unsqueeze(-1)

    def spread(self) -> tuple[Tensor, Tensor | float]:
        """Weight (channels of all heads, heads) and bias, in float32."""
        return self.weight.float().T, self.bias.float()


class PerHead(nn.Module):
    """One score per head from its own channels, without bias."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype).unsqueeze(-1)

    def spread(self) -> tuple[Tensor, Tensor | float]:
        """As of `AllChannels`, zero where a channel is another head's."""
        return torch.block_diag(*self.weight.float().unsqueeze(-1)), 0.0
