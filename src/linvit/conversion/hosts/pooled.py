"""Fewer keys than tokens, or fewer queries than keys: pooled by convolutions, means and maxima."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, ClassVar

import torch
from timm.layers import MultiQueryAttention2d
from timm.models import hieradet_sam2, mvitv2, nextvit, pvt_v2, twins
from timm.models.hiera import Hiera, MaskUnitAttention
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import (
    ANOTHER_WIDTH,
    FEATURES,
    POOLED_KEYS,
    POOLED_QUERIES,
    Ask,
    ChannelsLastHost,
    Host,
    SequenceHost,
    changes_width,
    grid_of,
    has_logits,
    to_tokens,
    unpack,
)

POOLING = ("down_pool", "down_conv", "norm", "upsample")
Strides = tuple[tuple[int, int], ...]


class PooledKeysHost(Host):
    """Keys and values from a picture that a strided convolution has shrunk."""

    features = {"pooling": ("sr", "norm")}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[1]
        stride = 1 if module.sr is None else module.sr.stride[0]
        return TokenGrid(height // stride, width // stride)

    def _pool(self, picture: Tensor) -> tuple[Tensor, TokenGrid]:
        picture = self.sr(picture)
        return self.norm(to_tokens(picture)), grid_of(picture)

    def forward(self, x: Tensor, size: Any) -> Tensor:
        grid = TokenGrid(size[0], size[1])
        source, key_grid = (x, grid) if self.sr is None else self._pool(grid.to_map(x[:, None]))
        q = self.split_heads(self.q(x))
        k, v = unpack(self.kv(source), 2, self.num_heads)
        return self.project_out(self.attend(q, k, v, grid, key_grid=key_grid, x=x), q)


class PVTv2Host(PooledKeysHost, pvt_v2.Attention):
    """PVTv2's attention. Keys and values come from a strided convolution; `drop=("pooling",)` takes it out, and the
    mechanism then sees every token as key, which is how Mobile-Attention's PVTv2-b2 loses its 4.3 M parameters."""

    features = {"pooling": ("sr", "norm", "pool", "act")}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return PooledKeysHost.grid(module, args, image) if module.pool is None else TokenGrid(7, 7)

    def _pool(self, picture: Tensor) -> tuple[Tensor, TokenGrid]:
        source, grid = super()._pool(picture if self.pool is None else self.pool(picture))
        return source if self.act is None else self.act(source), grid


class TwinsGlobalHost(PooledKeysHost, twins.GlobalSubSampleAttn):
    """Twins' `GlobalSubSampleAttn`, with keys from a strided convolution. Exact for softmax, at any input size.
    `drop=("pooling",)` takes the strided convolution out, and the mechanism then sees every token as key."""


class NextViTHost(SequenceHost, nextvit.EfficientAttention):
    """NextViT's attention, with keys averaged over runs of neighbouring tokens in reading order.

    Exact for softmax, any input size. The averaged keys no longer lie on a grid: mechanisms that look at one see a
    line. `drop=("pooling",)` takes the averaging and its norm out, and every token is a key.
    """

    features = {"pooling": ("sr", "norm")}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid if module.sr is None else TokenGrid.line(args[0].shape[1] // module.N_ratio)

    def forward(self, x: Tensor) -> Tensor:
        source, key_grid = x, self.token_grid
        if self.sr is not None:
            source = self.norm(self.sr(x.transpose(1, 2))).transpose(1, 2)
            key_grid = TokenGrid.line(source.shape[1])
        q, k, v = (self.split_heads(t) for t in (self.q(x), self.k(source), self.v(source)))
        return self.project_out(self.attend(q, k, v, self.token_grid, key_grid=key_grid, x=x), q)


class MultiQueryHost(Host, MultiQueryAttention2d):
    """The `MultiQueryAttention2d` of MobileNetV4 hybrid and MobileNetV5, over pictures.

    Exact for softmax, any input size. In multi-query attention all heads share one key and one value head; the
    mechanism sees them repeated. `drop=("pooling",)` takes strided keys and pooled queries out, for mechanisms that
    need as many keys as queries.
    """

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return Shape(module.num_heads, module.key_dim, module.value_dim, dim=module.query.proj.in_channels)

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        pooled = [FEATURES["pooling"]] if module.has_query_strides or module.kv_stride > 1 else []
        width = [ANOTHER_WIDTH] if changes_width(module.output.proj) else []
        return pooled + super().asks(model, module) + width

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        if feature == "pooling":
            for name in ("query", "key", "value", "output"):
                setattr(module, name, without_pooling(getattr(module, name)))
            module.has_query_strides, module.query_strides, module.kv_stride = False, (1, 1), 1

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return grid_of(args[0], module.kv_stride)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        grid, keys = grid_of(query), grid_of(key)
        q = grid.from_map(query, self.num_heads)
        k, v = (keys.from_map(t, 1).expand(-1, self.num_heads, -1, -1) for t in (key, value))
        tokens = None if self.has_query_strides else to_tokens(x)
        out = self.output(grid.to_map(self.attend(q, k, v, grid, key_grid=keys, bias=attn_mask, x=tokens)))
        return out if self.has_query_strides else self.finish(out, q)


def without_pooling(part: nn.Module) -> nn.Sequential:
    """A sequence of the same modules, under the same names, but for those that pool."""
    rest = nn.Sequential(OrderedDict((name, m) for name, m in part.named_children() if name not in POOLING))
    rest.training = part.training
    return rest


class MViTv2Host(Host, mvitv2.MultiScaleAttention):
    """MViTv2's `MultiScaleAttention`: queries, keys and values pooled by depthwise convolutions, a decomposed relative
    position, and the pooled query added to the output. The position is exact in mechanisms with logits, its tables
    resized for other input sizes, and given up with `drop=("relative_bias",)` elsewhere."""

    features = {"relative_bias": ("rel_pos_h", "rel_pos_w")}

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        stride_q, stride_k = (1 if pool is None else pool.stride for pool in (module.pool_q, module.pool_k))
        return super().asks(model, module) + ([POOLED_KEYS] if stride_q != stride_k else [])

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        height, width = args[1]
        if (pool := module.pool_k) is not None:
            sides = zip(args[1], pool.padding, pool.kernel_size, pool.stride, strict=True)
            height, width = ((side + 2 * pad - kernel) // step + 1 for side, pad, kernel, step in sides)
        return TokenGrid(height, width, int(module.has_cls_token))

    def _pool(
        self, x: Tensor, pool: nn.Module | None, norm: nn.Module | None, size: list[int]
    ) -> tuple[Tensor, list[int]]:
        if pool is not None:
            picture, first = mvitv2.reshape_pre_pool(x, size, self.has_cls_token)
            x, size = mvitv2.reshape_post_pool(pool(picture), self.num_heads, first)
        return (x if norm is None else norm(x)), size

    def forward(self, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
        q, k, v = self.project(x)
        q, q_size = self._pool(q, self.pool_q, self.norm_q, feat_size)
        k, k_size = self._pool(k, self.pool_k, self.norm_k, feat_size)
        v, _ = self._pool(v, self.pool_v, self.norm_v, feat_size)
        prefix = int(self.has_cls_token)
        bias = None
        if self.rel_pos_type == "spatial" and self.rel_pos_h is not None and has_logits(self.mechanism):
            bias = q.new_zeros(q.shape[0], self.num_heads, q.shape[2], k.shape[2])
            rows = resized(self.rel_pos_h, 2 * max(q_size[0], k_size[0]) - 1)
            columns = resized(self.rel_pos_w, 2 * max(q_size[1], k_size[1]) - 1)
            bias = mvitv2.cal_rel_pos_type(bias, q, self.has_cls_token, q_size, k_size, rows, columns)
        grid, key_grid = TokenGrid(q_size[0], q_size[1], prefix), TokenGrid(k_size[0], k_size[1], prefix)
        out = self.attend(q, k, v, grid, key_grid=key_grid, bias=bias, x=x)
        return self.project_out(out + q if self.residual_pooling else out, q), q_size


def resized(table: Tensor, length: int) -> Tensor:
    """A relative position table `(offsets, channels)` for another number of offsets."""
    return table if table.shape[0] == length else F.interpolate(table.t()[None], length, mode="linear")[0].t()


class HieraDetHost(ChannelsLastHost, hieradet_sam2.MultiScaleAttention):
    """SAM 2's `MultiScaleAttention` (HieraDet): over windows or the whole picture, with max-pooled queries where a
    stage begins. Exact for softmax, any input size. Layers with pooled queries need a mechanism that takes fewer
    queries than keys; a plan can keep them as they are."""

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([POOLED_QUERIES] if module.q_pool is not None else [])

    def forward(self, x: Tensor) -> Tensor:
        grid = key_grid = TokenGrid(x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        q, k, v = self.project(x)
        if self.q_pool is not None:
            picture = self.q_pool(grid.to_map(q))
            grid = grid_of(picture)
            q = grid.from_map(picture, self.num_heads)
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        return self.project_out(out, q).unflatten(1, (grid.height, grid.width))


class UnrolledHost(Host):
    """Hiera keeps the tokens of a mask unit in the order of its pooling, not row by row; mechanisms that look at the
    grid or at neighbours get them row by row."""

    pooled_by: ClassVar[str] = "q_stride"  # what the module calls the number of tokens that become one query
    strides: Strides = ()  # pooling still to come, each step of which is an outer axis of the tokens

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([POOLED_QUERIES] if getattr(module, cls.pooled_by) > 1 else [])

    def units_now(self) -> tuple[int, int]:
        """Mask units of the picture."""
        raise NotImplementedError

    def run(self, x: Tensor) -> Tensor:
        (batch, tokens, _), stride = x.shape, getattr(self, self.pooled_by)
        size = stride * self.window_size if self.use_mask_unit_attn else tokens
        units = tokens // size
        x = x.reshape(batch, size, units, -1).transpose(1, 2).flatten(0, 1)
        q, k, v = unpack(self.qkv(x), 3, self.shape(self).heads or 1)
        if stride > 1:
            q = q.unflatten(2, (stride, -1)).amax(2)
        out = self.project_out(self._attend(q, k, v, x), q)
        return out.unflatten(0, (batch, units)).transpose(1, 2).flatten(1, 2)

    def orders(self, k: Tensor) -> tuple[TokenGrid, TokenGrid, Tensor, Tensor] | None:
        """The grids of queries and keys, and where each is kept, row by row; none where that does not matter, or where
        masked units leave no picture."""
        units = (1, 1) if self.use_mask_unit_attn else self.units_now()
        key_grid, key_order = layout(self.strides, units)
        if self.mechanism.capabilities.equivariant or key_grid.tokens != k.shape[2]:
            return None
        pools = getattr(self, self.pooled_by) > 1
        grid, order = layout(self.strides[1:], units) if pools else (key_grid, key_order)
        return grid, key_grid, order.to(k.device), key_order.to(k.device)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        found = self.orders(k)
        if found is None:
            return self.attend(q, k, v, None, x=x)
        grid, key_grid, order, key_order = found
        k, v, x = k[:, :, key_order], v[:, :, key_order], x[:, key_order]
        out = self.attend(q[:, :, order], k, v, grid, key_grid=key_grid, x=x)
        return out[:, :, order.argsort()]


class HieraHost(UnrolledHost, MaskUnitAttention):
    """Hiera's `MaskUnitAttention`: inside mask units in the early stages, over the whole picture later, with max-pooled
    queries where a stage begins.

    Exact for softmax, at the image size the model was built for (Hiera's own unrolling has no other). Hiera keeps the
    tokens of a unit in the order of its pooling, not row by row; mechanisms that look at the grid or at neighbours get
    them row by row. Layers with pooled queries need a mechanism that takes fewer queries than keys.
    """

    units: tuple[int, int] = (1, 1)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        strides, units = next(where for attn, where in stages(image.owner) if attn.qkv is module.qkv)
        return layout(strides, (1, 1) if module.use_mask_unit_attn else units)[0]

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for attn, (strides, units) in stages(model):
            attn.strides, attn.units = strides, units

    def units_now(self) -> tuple[int, int]:
        return self.units

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def stages(model: nn.Module) -> Iterator[tuple[Any, tuple[Strides, tuple[int, int]]]]:
    """Each attention of the Hiera in a model with the pooling that lies ahead of it and its mask units."""
    for owner in model.modules():
        if isinstance(owner, Hiera):
            strides: Strides = tuple((rows, columns) for rows, columns in owner.unroll.schedule)
            blocks: Any = owner.blocks
            units = units_of(owner.unroll.size, strides)
            for attn, left in ahead((block.attn for block in blocks), strides, "q_stride"):
                yield attn, (left, units)


def ahead(layers: Iterable[Any], strides: Strides, pooled_by: str) -> Iterator[tuple[Any, Strides]]:
    """Each attention layer with the pooling that lies ahead of it, its own included."""
    for attn in layers:
        yield attn, strides
        if getattr(attn, pooled_by) > 1:
            strides = strides[1:]


def units_of(size: Any, strides: Strides) -> tuple[int, int]:
    """The mask units of so many tokens, which all of the pooling makes one token each."""
    return size[0] // prod(stride[0] for stride in strides), size[1] // prod(stride[1] for stride in strides)


def layout(strides: Strides, units: tuple[int, int]) -> tuple[TokenGrid, Tensor]:
    """The grid of tokens with these outer axes and, row by row, the place where Hiera keeps each."""
    axes = [n for stride in (*strides, units) for n in stride]
    order = torch.arange(prod(axes)).reshape(axes)
    order = order.permute(*range(len(axes) - 2, -1, -2), *range(len(axes) - 1, 0, -2)).flatten()
    return TokenGrid(prod(axes[0::2]), prod(axes[1::2])), order
