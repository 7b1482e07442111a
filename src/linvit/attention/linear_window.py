"""Linear attention and a window in one layer: the whole image roughly, the neighbourhood sharply.

    out = g ⊙ linear(q, k, v) + (1 − g) ⊙ window(q, k, v),   g = sigmoid(s), one learned number s a head

JetViT (CVPR 2026) finds the two together better than either alone; how it joins them is not published, and this is our
reading. `linear` is a mechanism that keeps the whole image in view, `window` the side of the softmax windows, as the
mechanism `window` has them. Both read the same q, k and v, so a pretrained layer needs no new projection, and s = 0 at
first, the mean of both. Rows sum to one where those of both parts do.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from linvit.attention import Call, Capabilities, LinearAttention, Mechanism, Shape, Size, mechanism_class, register
from linvit.attention.window import Side, Window

Linear = Literal["relu_linear", "elu_linear", "stella"]


@register("linear_window", paper="JetViT")
class LinearWindow(Mechanism):
    capabilities = Capabilities(grid=True, equivariant=False, unequal=False, rotary="features", dynamic=False)
    needs = ("heads",)
    examples = ({"window": 2}, {"window": (2, 3), "linear": "elu_linear"}, {"window": 3, "linear": "stella"})
    triton = True
    shared = LinearAttention.shared

    def __init__(self, shape: Shape, *, linear: Linear = "relu_linear", window: Side | tuple[Side, Side] = 8) -> None:
        super().__init__(shape)
        self.linear, self.window = mechanism_class(linear)(shape), Window(shape, window=window)
        self.share_of_linear = nn.Parameter(torch.zeros(shape.heads or 1))

    def share(self, *, rotary: Literal["after", "before"] = "after", centre: bool = False, **options: Any) -> None:
        """Of the linear part; the window's logits always have the rotary position in them."""
        self.linear.share(rotary=rotary, centre=centre)

    def enter(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Call]:
        return q, k, call  # each part in its own way

    def joined(self, far: Tensor, near: Tensor) -> Tensor:
        return torch.lerp(near, far, self.share_of_linear.sigmoid().to(far.dtype)[:, None, None])

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        (far_q, far_k, far), (near_q, near_k, near) = (part.enter(q, k, call) for part in (self.linear, self.window))
        return self.joined(self.linear.core(far_q, far_k, v, far), self.window.core(near_q, near_k, v, near))

    def fused(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | str:
        (far_q, far_k, far), (near_q, near_k, near) = (part.enter(q, k, call) for part in (self.linear, self.window))
        whole = self.linear.fused(far_q, far_k, v, far)
        if isinstance(whole, str):
            return whole
        sharp = self.window.fused(near_q, near_k, v, near)
        return sharp if isinstance(sharp, str) else self.joined(whole, sharp)

    def implied_map(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        (far_q, far_k, far), (near_q, near_k, near) = (part.enter(q, k, call) for part in (self.linear, self.window))
        return self.joined(self.linear.implied_map(far_q, far_k, far), self.window.implied_map(near_q, near_k, near))

    def macs(self, size: Size) -> int:
        return self.linear.macs(size) + self.window.macs(size)
