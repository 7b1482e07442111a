"""Softmax attention, what everything here is compared with.

out = softmax(q · kᵀ / √d + bias) · v
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Call, Capabilities, Mechanism, lift, register
from linvit.kernels import relu_quadratic as kernel


@register("softmax", paper="Attention Is All You Need")
class Softmax(Mechanism):
    capabilities = Capabilities(linear=False, bias=True, rotary="products")

    def logits(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = whole_bias(call, q.shape[0])
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask[:, None, None, :], float("-inf"))
        return scores

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return self.logits(q, k, call).softmax(-1)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        mask, bias = None if call.mask is None else call.mask[:, None, None, :], whole_bias(call, q.shape[0])
        if bias is not None:
            mask = (bias if mask is None else lift(bias).masked_fill(~mask, float("-inf"))).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def whole_bias(call: Call, batch: int) -> Tensor | None:
    """The bias with as many images as there are, or one. By `shape`, for `len` would fix a batch that an exporter is
    told may vary."""
    if call.bias is None or call.bias.shape[0] == 1:
        return call.bias
    images = call.bias.shape[0]
    if not torch.compiler.is_compiling() and images == batch:  # to a compiler, the answer would be a guard
        return call.bias
    return call.bias.repeat(batch // images, 1, 1, 1)


@register("relu_quadratic", paper="MixA")
class ReluQuadratic(Softmax):
    """ReLU attention for MixA's critical layers: `out = relu(q · kᵀ / √d + bias) · v / N`.

    Quadratic like softmax but without exponentials or row maxima. The formula is inferred from MixA's theorems; it is
    the one of Wortsman et al. (Replacing softmax with ReLU in Vision Transformers). A bias, and so a shift mask of
    −100, goes in before the ReLU.
    """

    triton = True

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return torch.relu(self.logits(q, k, call)) / call.keys

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        why = kernel.why_not(q, k, v, call.bias)
        if why is None:
            return kernel.relu_quadratic(q, k, v, call.mask, call.bias)
        out = None if self.impl == "triton" else kernel.on_cpu(q, k, v, call.mask, call.bias)
        return why if out is None else out
