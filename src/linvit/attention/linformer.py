"""Linformer (Wang et al.): keys and values projected along the tokens, from N to a few.

    out = softmax(q · (Eᵀ·k)ᵀ/√d) · (Fᵀ·v)

    original  E and F are N × rank, without bias, shared by the heads; `share_kv` makes them one. They start in
              U(±1/√rank) and rank is 256, as in the public implementations.
    fair      the Fair Comparison's LA: one Linear from N to max(1, N//8) with bias for keys, values and all heads.

The default is `original`. Its starting scale does not know N, so outputs grow with √N at first. A rank above N is
lowered to N (ours). `fair` ties its rank to N and so is quadratic, at an eighth of softmax's cost.

E and F have a row per token: the mechanism serves the number of keys it was built for and no other.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Mechanism, Shape, Size, register
from linvit.attention.options import Count


@register("linformer", paper="Linformer; Fair Comparison (LA)")
class Linformer(Mechanism):
    capabilities = Capabilities(any_tokens=False, equivariant=False, rotary="products")
    variants = ("original", "fair")
    needs = ("grid",)
    builds_on_grid = True
    examples = ({}, {"rank": 4, "share_kv": True})

    def __init__(
        self, shape: Shape, *, variant: str | None = None, rank: Count | None = None, share_kv: bool = False
    ) -> None:
        super().__init__(shape, variant=variant)
        assert shape.grid
        tokens, original = shape.grid.tokens, self.variant == "original"
        self.rank = min(rank or (256 if original else max(1, tokens // 8)), tokens)
        self.for_keys = TokenProjection(tokens, self.rank) if original else nn.Linear(tokens, self.rank)
        self.for_values = TokenProjection(tokens, self.rank) if original and not share_kv else None
        rotary = "products" if original else ""  # a bias on the keys does not turn with them
        self.capabilities = replace(self.capabilities, linear=original, normalised=not original, rotary=rotary)

    def attention(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """`(batch, heads, queries, rank)`, rows summing to one."""
        low_k = along_tokens(self.for_keys, call.keep(k))
        return (q @ low_k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        low_v = along_tokens(self.for_values or self.for_keys, call.keep(v))
        return self.attention(q, k, call) @ low_v

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        """By PyTorch's softmax attention over the few."""
        if q.dtype == torch.float16:
            return "float16 has too small a range for sums over tokens"
        low_k = along_tokens(self.for_keys, call.keep(k))
        low_v = along_tokens(self.for_values or self.for_keys, call.keep(v))
        return F.scaled_dot_product_attention(q, low_k, low_v)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        weight = (self.for_values or self.for_keys).weight
        implied = self.attention(q, k, call) @ weight.to(q.dtype)
        return implied if call.mask is None else implied * call.mask[:, None, None, :]

    def macs(self, size: Size) -> int:
        per_channel = (size.keys + size.queries) * self.rank
        return size.batch * size.heads * per_channel * (size.head_dim + size.value_dim)


class TokenProjection(nn.Module):
    """A projection of the tokens without bias. Not a Linear, so that a model's own initialisation leaves it alone."""

    bias = None

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rank, tokens).uniform_(-(rank**-0.5), rank**-0.5))


def along_tokens(projection: TokenProjection | nn.Linear, x: Tensor) -> Tensor:
    """`(batch, heads, rank, channels)` from x's tokens in x's dtype, heads side by side as they often lie."""
    rows = projection.weight.to(x.dtype) @ x.transpose(1, 2).flatten(2)
    if projection.bias is not None:
        rows = rows + projection.bias.to(x.dtype).unsqueeze(-1)
    return rows.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
