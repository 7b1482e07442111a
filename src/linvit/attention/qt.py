"""Taylor expansions of the softmax kernel exp(q·k/√d).

First order (`taylor`, ViTALiTy): 1 + q·k̂/√d with keys centred over the tokens, which makes the row sum N exactly.

Second order (`qt`, QT-ViT): exp(x) ≈ 1 + x + x²/2 = ((x + 1)² + 1)/2 is an inner product of Kronecker squares; keeping
only the squares brings its d² features down to d. Paper and released code differ, so there are three variants:

    released  ⟨q²/‖q²‖, k²/‖k²‖⟩ + s²                     the code's, and QT-ViT's accuracy; s learned, starts at 1
    exact     ((q·k/√d + 1)² + 1)/2                        (d + 1)² + 1 features
    compact   α²·Σ q²k² + β²·2/√d·q·k + γ²                 the paper's eq. 11; α, γ learned, β fixed at 0

The default is the released form. α = d^-½ and γ = √2 start compact at the exact expansion's terms (inferred).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, NormShortcut, Shape, TokenGrid, lift, register
from linvit.attention.linear import Constant, Formula, Fusion, LinearAttention, RowSum, Unnormalised
from linvit.attention.options import Eps, Number
from linvit.errors import LinvitError
from linvit.kernels import norm_gelu


@register("taylor", paper="ViTALiTy")
class Taylor(LinearAttention):
    """First-order Taylor attention: `out = (Σ v + q · (k̂ᵀ · v)/√d) / N`.

    `paper` (default) centres the keys over the tokens and divides by the row sum, which is then N. `released` is what
    ViTALiTy's repository computes: keys centred over their channels, no denominator, so its output grows with N.
    """

    variants = ("paper", "released")

    def __init__(self, shape: Shape, *, variant: str | None = None) -> None:
        super().__init__(shape, variant=variant)
        paper = self.variant == "paper"
        self.normaliser = Constant(lambda keys, head_dim: 1 / keys) if paper else Unnormalised()
        self.capabilities = replace(self.capabilities, normalised=paper, rotary="products" if paper else "features")

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        paper = self.variant == "paper"
        k = k - (call.keep(k).sum(-2, keepdim=True) / call.keys if paper else k.mean(-1, keepdim=True))
        return F.pad(q * q.shape[-1] ** -0.5, (0, 1), value=1.0), F.pad(k, (0, 1), value=1.0)

    def fusion(self, q: Tensor, k: Tensor, call: Call) -> Fusion | str:
        norm = self.normaliser.kernel(k.shape[2], q.shape[-1])
        phi_q, phi_k = (phi[..., :-1] for phi in self.features(lift(q), lift(k), call))
        return Fusion(phi_q, phi_k, Formula("identity", **(norm or {})), constant=phi_q.new_ones(()))

    def width(self, head_dim: int) -> int:
        return head_dim + 1


@register("qt", paper="QT-ViT")
class QuadraticTaylor(LinearAttention):
    """QT-ViT's quadratic Taylor attention with its optional position on keys and BatchNorm + GELU shortcut."""

    variants = ("released", "exact", "compact")
    builds_on_grid = True
    examples = ({}, {"beta": 1.0, "variant": "compact"}, {"shortcut": True}, {"position": True, "shortcut": True})

    def __init__(
        self, shape: Shape, *, variant: str | None = None, position: bool = False, shortcut: bool = False,
        beta: Number = 0.0, eps: Eps = 1e-15,
    ) -> None:  # fmt: skip
        super().__init__(shape, variant=variant)
        if beta and self.variant != "compact":
            raise LinvitError("beta belongs to variant='compact' of qt")
        self.beta, self.eps = beta, eps
        self.normaliser = RowSum(eps)
        if self.variant == "released":
            self.scale = nn.Parameter(torch.ones(()))
        if self.variant == "compact":
            self.require("head_dim")
            self.alpha = nn.Parameter(torch.tensor((shape.head_dim or 1) ** -0.5))
            self.gamma = nn.Parameter(torch.tensor(2.0**0.5))
        self.shortcut = self.position = None
        if shortcut:
            self.require("heads", "head_dim")
            self.shortcut = NormShortcut(shape.values)
        if position:
            self.require("heads", "head_dim", "grid")
            self.position = KeyPosition(shape)
        rotary = "features" if self.variant != "exact" else "" if position else "products"
        self.capabilities = replace(self.capabilities, grid=position, equivariant=not position, rotary=rotary)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if self.position is not None:
            k = k + self.position(call.key_grid).to(k.dtype)
        return self.expand(q), self.expand(k)

    def fusion(self, q: Tensor, k: Tensor, call: Call) -> Fusion | str:
        if self.variant == "exact":
            return super().fusion(q, k, call)
        if self.variant == "compact":
            phi_q, phi_k = (phi[..., :-1] for phi in self.features(lift(q), lift(k), call))
            formula = Formula("identity", row_sum=True, eps=self.eps, squared=True)
            return Fusion(phi_q, phi_k, formula, self.gamma)
        if self.eps > 1e-6:
            return f"an eps of {self.eps:g} counts, and the kernel leaves it out of the features"
        if self.position is not None:
            k = k + self.position(call.key_grid).to(k.dtype)
        formula = Formula("square", row_sum=True, eps=self.eps, squared=True)
        return Fusion(q, k, formula, self.scale)

    @property
    def constant(self) -> Tensor | None:
        return self.scale if self.variant == "released" else None

    def does_all(self) -> bool:
        return self.shortcut is None

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call, fusion: Fusion) -> Tensor | str:
        whole = None if self.shortcut is None else self.with_shortcut(v, call, fusion)
        return super().by_kernel(q, k, v, call, fusion) if whole is None else whole

    def with_shortcut(self, v: Tensor, call: Call, fusion: Fusion) -> Tensor | None:
        """The formula and its shortcut by one op, where that serves."""
        assert self.shortcut is not None
        ready = self.for_kernel(v, call, fusion)
        if isinstance(ready, str):
            return None
        qkv, formula, turn = ready
        norm = self.shortcut.for_kernel(v, call)
        if norm is None:
            return None
        return norm_gelu.attend(*qkv, formula, norm, call.mask, fusion.constant, turn).to(v.dtype)

    def expand(self, x: Tensor) -> Tensor:
        head_dim = x.shape[-1]
        if self.variant == "exact":
            x = F.pad(x * head_dim**-0.25, (0, 1), value=1.0)
            squares = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
            return F.pad(squares * 0.5**0.5, (0, 1), value=0.5**0.5)
        if self.variant == "compact":
            parts = [self.alpha.to(x.dtype) * x**2]
            if self.beta:
                parts.append(self.beta * (4 / head_dim) ** 0.25 * x)
            parts.append(self.gamma.to(x.dtype).expand(*x.shape[:-1], 1))
            return torch.cat(parts, dim=-1)
        x = x / (x.norm(dim=-1, keepdim=True) + self.eps)  # cancels below, keeps the squares in range
        x = x**2
        x = x / (x.norm(dim=-1, keepdim=True) + self.eps)
        return torch.cat((x, self.scale.to(x.dtype).expand(*x.shape[:-1], 1)), dim=-1)

    def width(self, head_dim: int) -> int:
        if self.variant == "exact":
            return (head_dim + 1) ** 2 + 1
        return 2 * head_dim + 1 if self.beta else head_dim + 1

    def finish(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return out if self.shortcut is None else self.shortcut.add(out, v, call)


class KeyPosition(nn.Module):
    """A learned position for keys, zero at first, resized bicubically to other grids. Prefix tokens have none."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.heads and shape.head_dim and shape.grid
        self.heads = shape.heads
        self.table = nn.Parameter(torch.zeros(1, shape.heads * shape.head_dim, shape.grid.height, shape.grid.width))

    def forward(self, grid: TokenGrid) -> Tensor:
        table: Tensor = self.table
        if table.shape[-2:] != (grid.height, grid.width):
            table = F.interpolate(table.float(), (grid.height, grid.width), mode="bicubic", align_corners=False)
        return F.pad(grid.from_map(table, self.heads), (0, 0, grid.prefix, 0))
