"""LeViT's attention and its down-sampling twin. Values are wider than keys; the bias by offset is exact in mechanisms
with logits and dropped with `drop=("relative_bias",)` elsewhere. Any input size: the bias table is resized."""

from __future__ import annotations

from typing import Any

from timm.models.levit import Attention, AttentionDownsample
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, bias_ask, offset_bias, unequal_ask


class _LevitBase(Host):
    """What the two share: shapes, the bias and the level of the pyramid they stand on."""

    level = 0
    attention_biases: Any
    resolution: Any

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.val_dim)

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.attention_biases = None
            module.attention_bias_idxs = None

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
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

    def _init_buffers(self) -> None:
        if self.attention_biases is not None:
            super()._init_buffers()  # type: ignore[misc]

    def _grid(self, level: int) -> TokenGrid:
        assert self.grids is not None and self.grids.grid is not None
        height, width = self.grids.grid.height, self.grids.grid.width
        for _ in range(level):
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
        return TokenGrid(height, width)

    def _bias(self, keys: TokenGrid, stride: int = 1) -> Tensor | None:
        if not self.mechanism.capabilities.bias or self.attention_biases is None:
            return None
        return offset_bias(self.attention_biases, self.resolution, keys, stride)


class LevitHost(_LevitBase, Attention):
    original = Attention

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [bias_ask("relative_bias")]

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*module.resolution)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) if self.use_conv else x
        qkv = self.qkv(x).flatten(2).transpose(1, 2) if self.use_conv else self.qkv(x)
        batch, count, _ = tokens.shape
        grid = TokenGrid(x.shape[2], x.shape[3]) if self.use_conv else self._grid(self.level)
        heads = qkv.reshape(batch, count, self.num_heads, -1).transpose(1, 2)
        q, k, v = heads.split([self.key_dim, self.key_dim, self.val_dim], dim=-1)
        out = self.attend(q, k, v, grid, bias=self._bias(grid), x=tokens)
        out = out.transpose(1, 2).reshape(batch, count, self.val_attn_dim)
        if self.use_conv:
            out = out.transpose(1, 2).reshape(batch, -1, grid.height, grid.width)
        return self.proj(out)


class LevitDownsampleHost(_LevitBase, AttentionDownsample):
    original = AttentionDownsample
    q: Any

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return [bias_ask("relative_bias"), unequal_ask("subsampled queries", droppable=False)]

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(*module.resolution)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_conv:
            key_grid = TokenGrid(x.shape[2], x.shape[3])
            picture, kv = x, self.kv(x).flatten(2).transpose(1, 2)
        else:
            key_grid = self._grid(self.level)
            picture, kv = key_grid.to_map(x[:, None]), self.kv(x)
        batch = x.shape[0]
        down = self.q.down if self.use_conv else self.q.down.pool
        small = picture[:, :, :: self.stride, :: self.stride] if down is None else down(picture)
        grid = TokenGrid(small.shape[2], small.shape[3])
        q = self.q.ln(small if self.use_conv else small.flatten(2).transpose(1, 2))
        q = q.flatten(2).transpose(1, 2) if self.use_conv else q
        q = q.reshape(batch, grid.tokens, self.num_heads, self.key_dim).transpose(1, 2)
        heads = kv.reshape(batch, key_grid.tokens, self.num_heads, -1).transpose(1, 2)
        k, v = heads.split([self.key_dim, self.val_dim], dim=-1)
        out = self.attend(q, k, v, grid, key_grid=key_grid, bias=self._bias(key_grid, self.stride))
        out = out.transpose(1, 2).reshape(batch, grid.tokens, self.val_attn_dim)
        if self.use_conv:
            out = out.transpose(1, 2).reshape(batch, -1, grid.height, grid.width)
        return self.proj(out)
