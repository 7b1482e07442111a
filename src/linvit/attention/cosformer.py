"""cosFormer (Qin et al.): ReLU features, re-weighted by a cosine of the distance between tokens.

    out = Σ_j w_ij · relu(q_i)·relu(k_j) · v_j / max(Σ_j w_ij · relu(q_i)·relu(k_j), eps)

    grid      w_ij = cos(π/2·Δrow) · cos(π/2·Δcolumn)      a pair with a prefix token has weight 1
    sequence  w_ij = cos(π/2·(i − j)/M), M = max(queries, keys)

cos(a − b) = cos a·cos b + sin a·sin b makes each weight an inner product, so features are copied once per term: two
blocks on a sequence, four on a grid. `sequence` is the paper's and its code's, made for text. The default `grid` is
inferred: on a raster order the sequence form puts vertical neighbours a whole row apart. Rows and columns are measured
at cell centres as fractions of the picture, (row + ½)/height, so that pooled keys sit on their queries; on equal grids
Δrow is (i − j)/height. Weight 1 for prefix tokens, also inferred, raises the rank of w by two: two more blocks where
there are any. eps = 1e-6 as in the released code.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention import Call, LinearAttention, ReLU, RowSum, Shape, Size, TokenGrid, register
from linvit.attention.options import Eps


@register("cosformer", paper="cosFormer")
class CosFormer(LinearAttention):
    feature = ReLU()
    variants = ("grid", "sequence")

    def __init__(self, shape: Shape, *, variant: str | None = None, eps: Eps = 1e-6) -> None:
        super().__init__(shape, variant=variant)
        self.normaliser = RowSum(eps, clamp=True)
        self.capabilities = replace(self.capabilities, grid=self.variant == "grid", equivariant=False)

    def features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if self.variant == "sequence":
            length = max(q.shape[2], k.shape[2])
            of_q, of_k = (waves(torch.arange(t.shape[2], device=t.device, dtype=t.dtype) / length) for t in (q, k))
        else:
            of_q, of_k = on_grid(call.grid, q), on_grid(call.key_grid, k)
            if call.grid.prefix or call.key_grid.prefix:
                (patch_q, prefix_q), (patch_k, prefix_k) = kinds(call.grid, q), kinds(call.key_grid, k)
                of_q = torch.cat((of_q, patch_q + prefix_q, prefix_q), dim=1)
                of_k = torch.cat((of_k, prefix_k, patch_k), dim=1)
        return spread(torch.relu(q), of_q), spread(torch.relu(k), of_k)

    def macs(self, size: Size) -> int:
        blocks = 2 if self.variant == "sequence" else 6 if size.grid.prefix or size.key_grid.prefix else 4
        per_value = (size.keys + size.queries) * size.value_dim + size.queries
        return size.batch * size.heads * per_value * blocks * size.head_dim


def waves(fraction: Tensor) -> Tensor:
    """Cosine and sine of a quarter turn times `fraction`: `(n, 2)`."""
    angle = math.pi / 2 * fraction
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def on_grid(grid: TokenGrid, like: Tensor) -> Tensor:
    """The four products of row and column waves: `(tokens, 4)`, zero for prefix tokens."""
    rows, columns = (
        waves((torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) / side)
        for side in (grid.height, grid.width)
    )
    patches = (rows[:, None, :, None] * columns[None, :, None, :]).reshape(grid.patches, 4)
    return F.pad(patches, (0, 0, grid.prefix, 0))


def kinds(grid: TokenGrid, like: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens are patches and which are prefix, as ones and zeros `(tokens, 1)`."""
    patch = F.pad(like.new_ones(grid.patches, 1), (0, 0, grid.prefix, 0))
    return patch, 1 - patch


def spread(x: Tensor, weights: Tensor) -> Tensor:
    """A copy of x's channels per column of `weights`, `(tokens, blocks)`, weighted by it."""
    return (x.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)
