"""Gated linear attention: RALA, MALA and NaLa differ in the map and share what is around it.

    out = (map · v + conv5×5(v)) ⊙ gate,  gate = W·x + b of the block's input x

    rala  κ(q_i)·w_j κ(k_j) / row sum,   w_j = N·softmax_j(s·mean κ(q)·κ(k_j)),   κ = elu + 1, s = d^-½
    mala  (1 + 1/z_i)·s·κ(q_i)·κ(k_j)/N − z_i/N,   z_i = s·κ(q_i)·mean κ(k)
    nala  φ(q_i)·φ(k_j) / row sum,   φ(q) = [relu(±q)/‖q‖]^p, p = 3(½ + tanh ‖q‖),   φ(k) = relu(±k)³

RALA ("Breaking the Low-Rank Dilemma", Fan et al., CVPR 2025) weighs the keys by how they answer the mean query, which
raises the rank of the state. MALA (Fan et al., ICCV 2025) lets a query's length sharpen its row, as in softmax; rows
sum to one, and weights may be negative. NaLa (NaLaFormer, ICML 2026) has the length set a power, features for both
signs, a LayerNorm before the gate, and the gate's SiLU. Formulas are those of the released code, with eps = 1e-6 beside
z and beside the mean over keys. All three have rotary position in the numerator only, where a host brings it.

`kernel_size=None` and `gate=False` take the parts around the map away. A converted model starts with the gate at one
and the convolution at zero. Prefix tokens have no place on the grid and get no convolution (inferred).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import (
    Call,
    Capabilities,
    Constant,
    EluPlusOne,
    Fusion,
    LinearAttention,
    RowSum,
    Shape,
    Size,
    register,
)  # fmt: skip
from linvit.attention.local import Filter, Gate, GridConv, run
from linvit.attention.options import ConvWidth


class GatedLinear(LinearAttention):
    """Linear attention with a convolution of the values and a gate from the block's input, both optional."""

    capabilities = Capabilities(rotary="features")
    activation = ""  # of the gate
    shared_filters = False  # by the heads

    def __init__(
        self, shape: Shape, *, variant: str | None = None, kernel_size: ConvWidth | None = 5, gate: bool = True
    ) -> None:
        super().__init__(shape, variant=variant)
        self.conv = self.gate = None
        if kernel_size or gate:
            self.require("heads", "head_dim")
        if kernel_size:
            self.conv = GridConv(shape.values * (1 if self.shared_filters else shape.heads or 1), kernel_size)
        if gate:
            self.gate = Gate(shape, self.activation)
        local = self.conv is not None
        self.capabilities = replace(self.capabilities, grid=local, equivariant=not local, input=gate)

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        out = self.normalise(self.add_near(out, v, call))
        return out if self.gate is None else self.gate(out, call)

    @property
    def near(self) -> Filter | None:
        return self.conv

    def normalise(self, out: Tensor) -> Tensor:
        return out

    def macs(self, size: Size) -> int:
        return super().macs(size) + self.macs_around(size)

    def macs_around(self, size: Size) -> int:
        """Of convolution and gate."""
        return sum(part.macs(size) for part in (self.conv, self.gate) if part is not None)


@register("rala", paper="Breaking the Low-Rank Dilemma of Linear Attention")
class RALA(GatedLinear):
    feature = EluPlusOne()
    normaliser = RowSum(1e-6, per_key=True)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        phi_q, phi_k = self.feature(q), self.feature(k)
        answers = phi_k @ (call.mean_query(phi_q) * q.shape[-1] ** -0.5).transpose(-2, -1)
        return phi_q, phi_k * call.keep(answers, float("-inf")).softmax(-2) * call.keys

    def feature_macs(self, size: Size) -> int:
        return size.batch * size.heads * size.keys * size.head_dim


@register("mala", paper="Rectifying Magnitude Neglect in Linear Attention")
class MALA(GatedLinear):
    examples = ({}, {"kernel_size": None, "gate": False})
    feature = EluPlusOne()
    normaliser = Constant(lambda keys, head_dim: 1 / keys)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        phi_q, phi_k = self.feature(q) * q.shape[-1] ** -0.5, self.feature(k)
        mean = call.keep(phi_k).sum(-2, keepdim=True) / call.keys
        length = phi_q @ mean.transpose(-2, -1)
        return torch.cat((phi_q * (1 + 1 / (length + 1e-6)), -length), dim=-1), F.pad(phi_k, (0, 1), value=1.0)

    def fusion(self, q: Tensor, k: Tensor, call: Call) -> Fusion | str:
        """The same about the mean key, as long as no position turns that: weights of a row are large and of both signs
        but sum to one, and what they cancel to is less than bfloat16 can tell of them."""
        fusion = super().fusion(q, k, call)
        if isinstance(fusion, str) or call.rotary is not None:
            return fusion
        mean = call.keep(fusion.k).sum(-2, keepdim=True) / call.keys
        total = fusion.q @ mean.transpose(-2, -1)
        phi_q, phi_k = fusion.q[..., :-1], fusion.k[..., :-1] - mean[..., :-1]
        return replace(fusion, q=torch.cat((phi_q, total), dim=-1), k=F.pad(phi_k, (0, 1), value=1.0))

    def width(self, head_dim: int) -> int:
        return head_dim + 1

    def feature_macs(self, size: Size) -> int:
        return size.batch * size.heads * size.queries * size.head_dim


@register("nala", paper="NaLaFormer")
class NaLa(GatedLinear):
    normaliser = RowSum(1e-6, per_key=True)
    activation = "silu"

    def __init__(
        self, shape: Shape, *, kernel_size: ConvWidth | None = 5, gate: bool = True, norm: bool = True
    ) -> None:
        super().__init__(shape, kernel_size=kernel_size, gate=gate)
        self.norm = None
        if norm:
            self.require("heads", "head_dim")
            self.norm = nn.LayerNorm((shape.heads or 1) * shape.values)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
        power = 3 * (0.5 + length.tanh())
        return (signs(q) / length.clamp_min(1e-12)) ** power, signs(k) ** 3

    def width(self, head_dim: int) -> int:
        return 2 * head_dim

    def normalise(self, out: Tensor) -> Tensor:
        if self.norm is None:
            return out
        merged = run(self.norm, out.transpose(1, 2).flatten(2))
        return merged.unflatten(2, (out.shape[1], -1)).transpose(1, 2)


def signs(x: Tensor) -> Tensor:
    """What of x is positive and, as channels of their own, what is negative."""
    return torch.cat((torch.relu(x), torch.relu(-x)), dim=-1)
