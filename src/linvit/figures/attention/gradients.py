"""What takes the place of a map where a mechanism has none."""

from typing import Any

import torch
from torch import Tensor

from linvit.attention import Mechanism, TokenGrid


def gradient_row(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, query: int, grid: TokenGrid | None, given: dict[str, Any]
) -> Tensor:
    """`(heads, keys)`: the length of the gradient of ‖out_i‖ by each token's q, k and v.

    By v alone it would be a single point in XCA and Fastformer, where a token's value reaches no other token: what they
    know of others comes by way of q and k.
    """
    with torch.enable_grad():
        tokens = [t.detach().float().requires_grad_() for t in (q, k, v)]
        out = mechanism(*tokens, grid, **given)
        lengths = out[0, :, query].norm(dim=-1).sum()
        found = torch.autograd.grad(lengths, tokens, allow_unused=True)
    squares = [gradient[0].square().sum(-1) for gradient in found if gradient is not None]
    return torch.stack(squares).sum(0).sqrt()
