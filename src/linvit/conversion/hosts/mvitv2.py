"""MViTv2's `MultiScaleAttention`: queries, keys and values pooled by depthwise convolutions, a decomposed relative
position, and the pooled query added to the output. The position is exact in mechanisms with logits, its tables resized
for other input sizes, and given up with `drop=("relative_bias",)` elsewhere."""

from __future__ import annotations

from typing import Any

from timm.models.mvitv2 import MultiScaleAttention, cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import POOLED_KEYS, Ask, Host, has_logits


class MViTv2Host(Host, MultiScaleAttention):
    original = MultiScaleAttention
    features = {"relative_bias": ("rel_pos_h", "rel_pos_w")}

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        stride_q = module.pool_q.stride if module.pool_q is not None else 1
        stride_k = module.pool_k.stride if module.pool_k is not None else 1
        return super().asks(model, module) + ([POOLED_KEYS] if stride_q != stride_k else [])

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        if feature == "relative_bias":
            module.rel_pos_type = ""

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[1]
        if module.pool_k is not None:
            pool = module.pool_k
            height, width = (
                (size + 2 * pad - kernel) // step + 1
                for size, pad, kernel, step in zip(
                    (height, width), pool.padding, pool.kernel_size, pool.stride, strict=True
                )
            )
        return TokenGrid(height, width, int(module.has_cls_token))

    def _pool(
        self, x: Tensor, pool: nn.Module | None, norm: nn.Module | None, size: list[int]
    ) -> tuple[Tensor, list[int]]:
        if pool is not None:
            picture, first = reshape_pre_pool(x, size, self.has_cls_token)
            x, size = reshape_post_pool(pool(picture), self.num_heads, first)
        return (x if norm is None else norm(x)), size

    def forward(self, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
        q, k, v = self.project(x)
        q, q_size = self._pool(q, self.pool_q, self.norm_q, feat_size)
        k, k_size = self._pool(k, self.pool_k, self.norm_k, feat_size)
        v, _ = self._pool(v, self.pool_v, self.norm_v, feat_size)
        prefix = int(self.has_cls_token)
        bias = None
        if self.rel_pos_type == "spatial" and has_logits(self.mechanism):
            bias = q.new_zeros(len(q), self.num_heads, q.shape[2], k.shape[2])
            rows = resized(self.rel_pos_h, 2 * max(q_size[0], k_size[0]) - 1)
            columns = resized(self.rel_pos_w, 2 * max(q_size[1], k_size[1]) - 1)
            bias = cal_rel_pos_type(bias, q, self.has_cls_token, q_size, k_size, rows, columns)
        grid, key_grid = TokenGrid(q_size[0], q_size[1], prefix), TokenGrid(k_size[0], k_size[1], prefix)
        out = self.attend(q, k, v, grid, key_grid=key_grid, bias=bias, x=x)
        if self.residual_pooling:
            out = out + q
        return self.project_out(out, q), q_size


def resized(table: Tensor, length: int) -> Tensor:
    """A relative position table `(offsets, channels)` for another number of offsets."""
    if table.shape[0] == length:
        return table
    return F.interpolate(table.t()[None], length, mode="linear")[0].t()
