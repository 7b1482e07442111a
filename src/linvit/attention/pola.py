"""PolaFormer (Meng et al., ICLR 2025): attention by polarity, with products of both signs kept apart.

    x± = relu(±x/softplus(scale))^p,  p = 1 + 4·σ(power)        for q and for k + position; scale, power per channel
    same      = [q+, q−]·[k+, k−] / row sum                     attends to the first half of a head's values
    opposite  = [q−, q+]·[k+, k−] / row sum                     attends to the second half
    out       = (map · v + conv5×5(v)) ⊙ gate,  gate = W·x + b of the block's input x

ReLU features forget every product with a negative factor; here those of two negative ones count as same, and those of
mixed signs get values of their own instead of a minus. The power sharpens the map, per channel and learned. Filters of
the convolution are shared by the heads. All as in the released code; eps = 1e-6 stands beside the mean over keys.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, LinearAttention, RowSum, Shape, Size, register, regroup
from linvit.attention.gated import GatedLinear, signs
from linvit.attention.options import ConvWidth, Number
from linvit.attention.qt import KeyPosition
from linvit.errors import LinvitError


@register("pola", paper="PolaFormer")
class Pola(GatedLinear):
    """The map has two heads for each of the host's: same and opposite."""

    needs = ("heads", "head_dim", "grid")
    builds_on_grid = True
    normaliser = RowSum(1e-6, per_key=True)
    shared_filters = True

    def __init__(
        self, shape: Shape, *, alpha: Number = 4.0, kernel_size: ConvWidth | None = 5, gate: bool = True
    ) -> None:
        super().__init__(shape, kernel_size=kernel_size, gate=gate)
        heads, head_dim = shape.heads or 1, shape.head_dim or 1
        if shape.values % 2:
            raise LinvitError(f"pola halves the values of a head: {shape.values} channels are odd")
        self.alpha = alpha
        self.power = nn.Parameter(torch.zeros(heads, 1, head_dim))
        self.scale = nn.Parameter(torch.zeros(heads, 1, head_dim))
        self.position = KeyPosition(shape)
        self.capabilities = replace(self.capabilities, grid=True, equivariant=False)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        power = 1 + self.alpha * self.power.to(q.dtype).sigmoid()
        scale = F.softplus(self.scale.to(q.dtype))
        power = torch.cat((power, power), dim=-1)
        same = signs(q / scale) ** power
        opposite = same.roll(q.shape[-1], dims=-1)
        phi_k = signs((k + self.position(call.key_grid).to(k.dtype)) / scale) ** power
        return torch.stack((same, opposite), dim=2).flatten(1, 2), phi_k.repeat_interleave(2, dim=1)

    def width(self, head_dim: int) -> int:
        return 2 * head_dim

    def core(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return regroup(super().core(q, k, regroup(v, 2 * v.shape[1]), call), v.shape[1])

    def macs(self, size: Size) -> int:
        halves = replace(size, heads=2 * size.heads, value_dim=size.value_dim // 2)
        return LinearAttention.macs(self, halves) + self.macs_around(size)
