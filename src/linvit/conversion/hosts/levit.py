"""LeViT's attention and its down-sampling twin. Values are wider than keys; the bias by offset is exact in mechanisms
with logits and dropped with `drop=("relative_bias",)` elsewhere. Any input size: the bias table is resized."""

from __future__ import annotations

from typing import Any

from timm.models.levit import Attention, AttentionDownsample
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import SUBSAMPLED_QUERIES, OffsetBiasHost, grid_of, merge_heads, to_tokens


class _LevitBase(OffsetBiasHost):
    """What the two share: shapes and the level of the pyramid they stand on."""

    level = 0

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.val_dim)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*module.resolution)

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for owner in model.modules():
            stem = getattr(owner, "stem", None)
            inside = [m for m in owner.modules() if isinstance(m, Attention | AttentionDownsample)]
            if not isinstance(stem, nn.Module) or not inside:
                continue
            found: list[Grids] = [m.grids for m in inside if isinstance(m, _LevitBase) and m.grids is not None]
            grids = found[0] if found else Grids()
            if not found:
                stem.register_forward_hook(grids.after_stem)
            level = 0
            for module in inside:
                if isinstance(module, _LevitBase):
                    module.grids, module.level = grids, level
                level += isinstance(module, AttentionDownsample)

    def _grid(self, level: int) -> TokenGrid:
        assert self.grids is not None and self.grids.grid is not None
        height, width = self.grids.grid.height, self.grids.grid.width
        for _ in range(level):
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
        return TokenGrid(height, width)

    def _tokens(self, x: Tensor) -> Tensor:
        return to_tokens(x) if self.use_conv else x

    def _project_out(self, out: Tensor, grid: TokenGrid) -> Tensor:
        tokens = merge_heads(out)
        return self.proj(grid.to_map(tokens[:, None]) if self.use_conv else tokens)


class LevitHost(_LevitBase, Attention):
    original = Attention

    def forward(self, x: Tensor) -> Tensor:
        grid = grid_of(x) if self.use_conv else self._grid(self.level)
        q, k, v = self.split_packed(self._tokens(self.qkv(x)))
        return self._project_out(self.attend(q, k, v, grid, bias=self.bias(grid), x=self._tokens(x)), grid)


class LevitDownsampleHost(_LevitBase, AttentionDownsample):
    original = AttentionDownsample
    needs = (SUBSAMPLED_QUERIES,)
    q: Any

    def forward(self, x: Tensor) -> Tensor:
        key_grid = grid_of(x) if self.use_conv else self._grid(self.level)
        picture = x if self.use_conv else key_grid.to_map(x[:, None])
        down = self.q.down if self.use_conv else self.q.down.pool
        small = picture[:, :, :: self.stride, :: self.stride] if down is None else down(picture)
        q = self.split_heads(self._tokens(self.q.ln(small if self.use_conv else to_tokens(small))))
        k, v = self.split_heads(self._tokens(self.kv(x))).split([self.key_dim, self.val_dim], dim=-1)
        grid, bias = grid_of(small), self.bias(key_grid, self.stride)
        return self._project_out(self.attend(q, k, v, grid, key_grid=key_grid, bias=bias), grid)
