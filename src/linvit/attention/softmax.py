"""Softmax attention, what everything here is compared with.

out = softmax(q · kᵀ / √d + bias) · v
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.mechanism import NO_KERNEL, Call, Capabilities, Mechanism, Size, lift
from linvit.attention.registry import register
from linvit.kernels import relu_quadratic as kernel


@register("softmax", paper="Attention Is All You Need")
class Softmax(Mechanism):
    capabilities = Capabilities(linear=False, bias=True, rotary=True)

    def logits(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = call.whole_bias(len(q))
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask[:, None, None, :], float("-inf"))
        return scores

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return self.logits(q, k, call).softmax(-1)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        if self.impl == "triton":
            return NO_KERNEL
        bias = call.whole_bias(len(q))
        if call.mask is not None and bias is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask[:, None, None, :])
        if call.mask is not None and bias is not None:
            bias = lift(bias).masked_fill(~call.mask[:, None, None, :], float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))

    def macs(self, size: Size) -> int:
        pairs = size.queries * size.keys
        return size.batch * size.heads * pairs * (size.head_dim + size.value_dim)


@register("relu_quadratic", paper="MixA")
class ReluQuadratic(Softmax):
    """ReLU attention for MixA's critical layers: `out = relu(q · kᵀ / √d + bias) · v / N`.

    Quadratic like softmax but without exponentials or row maxima. The formula is inferred from MixA's theorems; it is
    the one of Wortsman et al. (Replacing softmax with ReLU in Vision Transformers). A bias, and so a shift mask of
    −100, goes in before the ReLU.
    """

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return torch.relu(self.logits(q, k, call)) / call.keys

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        why = kernel.why_not(q, k, v, call.bias)
        if why is None:
            return kernel.relu_quadratic(q, k, v, call.mask, call.bias)
        out = None if self.impl == "triton" else kernel.on_cpu(q, k, v, call.mask, call.bias)
        return why if out is None else out
