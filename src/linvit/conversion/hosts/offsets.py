"""LeViT's relative position, which others took over: a table of one value for each |Δrow|, |Δcolumn|.

The bias is exact in mechanisms with logits and given up with `drop=("relative_bias",)` elsewhere. On another grid than
it was learned on, the table is resized.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.layers import to_2tuple
from timm.models import efficientformer, tiny_vit
from timm.models.efficientformer_v2 import Attention2d, Attention2dDownsample
from timm.models.efficientvit_msra import CascadedGroupAttention, LocalWindowAttention
from timm.models.levit import Attention, AttentionDownsample
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import (
    CLOSED,
    SUBSAMPLED_QUERIES,
    Ask,
    Host,
    PictureHost,
    SequenceHost,
    grid_of,
    has,
    has_logits,
    merge_heads,
    to_tokens,
)


class OffsetBiasHost(Host):
    features = {"relative_bias": ("attention_biases", "attention_bias_idxs")}

    @classmethod
    def shape(cls, module: Any) -> Shape:
        packed = getattr(module, "qkv", None)
        packed = getattr(packed, "linear", packed)  # LeViT's, before its norm
        dim = getattr(packed, "in_features", None) or getattr(packed, "in_channels", None)
        return Shape(module.num_heads, module.key_dim, module.val_dim, dim=dim)

    def _init_buffers(self) -> None:
        if self.attention_biases is not None:
            super()._init_buffers()  # type: ignore[misc]

    def bias(self, keys: TokenGrid, stride: int = 1) -> Tensor | None:
        """The bias for a mechanism with logits, `(1, heads, queries, keys)`.

        Learned at `resolution`; on another grid the table is resized bilinearly, so that any input size works.
        """
        table, learned, size = self.attention_biases, to_2tuple(self.resolution), (keys.height, keys.width)
        if table is None or not has_logits(self.mechanism):
            return None
        if size != tuple(learned):
            table = F.interpolate(table[None].unflatten(-1, tuple(learned)), size, mode="bilinear")[0].flatten(-2)
        rows, columns = (torch.arange(side, device=table.device) for side in size)
        row = (rows[::stride, None] - rows[None, :]).abs()
        column = (columns[::stride, None] - columns[None, :]).abs()
        index = row[:, None, :, None] * keys.width + column[None, :, None, :]
        return table[:, index.flatten(2).flatten(0, 1)][None]

    def split_packed(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of heads that lie one behind the other."""
        return self.split_heads(packed).split([self.key_dim, self.key_dim, self.val_dim], dim=-1)


class TinyViTHost(OffsetBiasHost, tiny_vit.Attention):
    """TinyViT's attention in windows, with a bias for each offset.

    Exact for softmax, at any input size. The bias is exact in mechanisms with logits and given up with
    `drop=("relative_bias",)` elsewhere. Windows that hang over the edge see zero padding as tokens, as in the original.
    """

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return replace(super().shape(module), grid=TokenGrid(*module.resolution))

    def forward(self, x: Tensor) -> Tensor:
        grid, x = TokenGrid(*self.resolution), self.norm(x)
        q, k, v = self.split_packed(self.qkv(x))
        return self.project_out(self.attend(q, k, v, grid, bias=self.bias(grid), x=x), q)


class EfficientFormerV1Host(OffsetBiasHost, SequenceHost, efficientformer.Attention):
    """EfficientFormer's attention in its last blocks, with values wider than keys and a bias for each offset.

    Exact for softmax. The bias is exact in mechanisms with logits and given up with `drop=("relative_bias",)`
    elsewhere. The original takes one input size; here the bias table, learned on 7×7, is resized for any other.
    """

    features = {"relative_bias": ("attention_biases",)}  # its index stays, as it is among the weights
    resolution = (7, 7)  # every model has its table on the grid of a 224-pixel image

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split_packed(self.qkv(x))
        grid = self.token_grid
        bias = self.bias(grid or TokenGrid(*self.resolution))
        return self.project_out(self.attend(q, k, v, grid, bias=bias, x=x), q)


class _EfficientFormerBase(OffsetBiasHost, PictureHost):
    needs: ClassVar[tuple[Ask, ...]] = (CLOSED,)

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.d, dim=module.k.conv.in_channels)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return grid_of(args[0], 2 if has(module, "stride_conv") else 1)

    def _heads(self, *pictures: Tensor) -> tuple[Tensor, ...]:
        return tuple(grid_of(picture).from_map(picture, self.num_heads) for picture in pictures)

    def _join(self, out: Tensor, local: Tensor) -> Tensor:
        return grid_of(local).to_map(out) + local


class EfficientFormerHost(_EfficientFormerBase, Attention2d):
    """EfficientFormerV2's attention over pictures and its down-sampling twin.

    Talking heads mix the logits of all heads, which only softmax has: other mechanisms give them up with
    `drop=("talking_heads", "relative_bias")`. The local branch on v and every projection stay. Any input size: the bias
    table is resized.
    """

    features = {**OffsetBiasHost.features, "talking_heads": ("talking_head1", "talking_head2")}

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        if self.stride_conv is not None:
            x = self.stride_conv(x)
        value = self.v(x)
        q, k, v = self._heads(self.q(x), self.k(x), value)
        bias = self.bias(grid_of(x))
        if self.talking_head1 is None:
            out = self.attend(q, k, v, grid_of(x), bias=bias, x=to_tokens(x))
        else:
            logits = q @ k.transpose(-2, -1) * self.scale
            logits = logits if bias is None else logits + bias.to(logits.dtype)
            out = self.talking_head2(torch.softmax(self.talking_head1(logits), -1)) @ v
        out = self._join(out, self.v_local(value))
        if self.upsample is not None:
            out = F.interpolate(out, size, mode="bilinear")
        return self.proj(self.act(out))


class EfficientFormerDownsampleHost(_EfficientFormerBase, Attention2dDownsample):
    needs = (CLOSED, SUBSAMPLED_QUERIES)

    def forward(self, x: Tensor) -> Tensor:
        keys, query, value = grid_of(x), self.q(x), self.v(x)
        q, k, v = self._heads(query, self.k(x), value)
        out = self.attend(q, k, v, grid_of(query), key_grid=keys, bias=self.bias(keys, 2))
        return self.proj(self.act(self._join(out, self.v_local(value))))


class CascadedHost(OffsetBiasHost, PictureHost, CascadedGroupAttention):
    """EfficientViT (MSRA): cascaded group attention, where each head reads what the head before it put out.

    Heads run one after the other, each through the same mechanism: it has one head, and what parameters it brings are
    shared by all. Exact for softmax. The bias for each offset is exact in mechanisms with logits and given up with
    `drop=("relative_bias",)` elsewhere. The original takes one input size; a converted model takes any, with the same
    windows and the bias table resized where the last stage sees another grid than the one it was learned on.
    """

    needs = (CLOSED,)

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(1, module.key_dim, module.val_dim, dim=module.qkvs[0].conv.in_channels)

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for owner in model.modules():
            if type(owner) is LocalWindowAttention and isinstance(owner.attn, cls):
                owner.__class__ = AnySizeWindows

    def forward(self, x: Tensor) -> Tensor:
        grid = grid_of(x)
        bias = self.bias(grid)
        outs: list[Tensor] = []
        for head, (part, qkv, near) in enumerate(zip(x.chunk(len(self.qkvs), dim=1), self.qkvs, self.dws, strict=True)):
            feature = part + outs[-1] if outs else part
            query, key, value = qkv(feature).split([self.key_dim, self.key_dim, self.val_dim], dim=1)
            q, k, v = (grid.from_map(t, 1) for t in (near(query), key, value))
            own = None if bias is None else bias[:, head : head + 1]
            outs.append(grid.to_map(self.attend(q, k, v, grid, bias=own, x=to_tokens(feature))))
        return self.proj(torch.cat(outs, dim=1))


class AnySizeWindows(LocalWindowAttention):
    """The windows around the attention, on a picture of any size; zero padding counts as tokens, as in the original."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        side = self.window_resolution
        if height <= side and width <= side:
            return self.attn(x)
        x = F.pad(x, (0, -width % side, 0, -height % side))
        rows, columns = x.shape[2] // side, x.shape[3] // side
        windows = x.reshape(batch, channels, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
        windows = self.attn(windows.reshape(-1, channels, side, side))
        x = windows.reshape(batch, rows, columns, channels, side, side).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(batch, channels, rows * side, columns * side)[:, :, :height, :width]


class _LevitBase(OffsetBiasHost):
    """What the two of LeViT share: the level of the pyramid they stand on."""

    needs: ClassVar[tuple[Ask, ...]] = (CLOSED,)
    level = 0

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
            grids = next((m.grids for m in inside if isinstance(m, _LevitBase) and m.grids is not None), None)
            if grids is None:
                grids = Grids()
                stem.register_forward_hook(grids.after_stem)
            level = 0
            for module in inside:
                if isinstance(module, _LevitBase):
                    module.grids, module.level = grids, level
                level += isinstance(module, AttentionDownsample)

    def _grid(self, x: Tensor) -> TokenGrid:
        if self.use_conv:
            return grid_of(x)
        assert self.grids is not None and self.grids.grid is not None
        height, width = self.grids.grid.height, self.grids.grid.width
        for _ in range(self.level):
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
        return TokenGrid(height, width)

    def _tokens(self, x: Tensor) -> Tensor:
        return to_tokens(x) if self.use_conv else x

    def _project_out(self, out: Tensor, grid: TokenGrid) -> Tensor:
        return self.proj(grid.to_map(out) if self.use_conv else merge_heads(out))


class LevitHost(_LevitBase, Attention):
    """LeViT's attention and its down-sampling twin. Values are wider than keys; the bias by offset is exact in
    mechanisms with logits and dropped with `drop=("relative_bias",)` elsewhere. Any input size: the bias table is
    resized."""

    def forward(self, x: Tensor) -> Tensor:
        grid = self._grid(x)
        q, k, v = self.split_packed(self._tokens(self.qkv(x)))
        return self._project_out(self.attend(q, k, v, grid, bias=self.bias(grid), x=self._tokens(x)), grid)


class LevitDownsampleHost(_LevitBase, AttentionDownsample):
    needs = (CLOSED, SUBSAMPLED_QUERIES)
    q: Any

    def forward(self, x: Tensor) -> Tensor:
        key_grid = self._grid(x)
        picture = x if self.use_conv else key_grid.to_map(x[:, None])
        down = self.q.down if self.use_conv else self.q.down.pool
        small = picture[:, :, :: self.stride, :: self.stride] if down is None else down(picture)
        q = self.split_heads(self._tokens(self.q.ln(small if self.use_conv else to_tokens(small))))
        k, v = self.split_heads(self._tokens(self.kv(x))).split([self.key_dim, self.val_dim], dim=-1)
        grid, bias = grid_of(small), self.bias(key_grid, self.stride)
        return self._project_out(self.attend(q, k, v, grid, key_grid=key_grid, bias=bias), grid)
