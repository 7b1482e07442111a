"""Fewer keys than tokens, or fewer queries than keys: SegFormer, PVT v2, SAM 2's encoder, Hiera."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.models.hiera.modeling_hiera import HieraMaskUnitAttention, HieraModel
from transformers.models.pvt_v2.modeling_pvt_v2 import PvtV2SelfAttention
from transformers.models.sam2.modeling_sam2 import Sam2MultiScaleAttention
from transformers.models.segformer.modeling_segformer import SegformerAttention

from linvit.attention import TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import (
    POOLED_QUERIES,
    Ask,
    ChannelsLastHost,
    SequenceHost,
    grid_of,
    merge_heads,
    to_tokens,
    unpack,
)
from linvit.conversion.hosts.pooled import Strides, UnrolledHost, ahead, layout, units_of
from linvit.conversion.huggingface.interface import MapHost, attentions_wanted, follow_embeddings
from linvit.errors import LinvitError


class _PooledKeys(MapHost):
    """Keys and values from a picture that a strided convolution has shrunk."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)


class HFSegformerHost(_PooledKeys, SegformerAttention):
    """Hugging Face's SegFormer and PVT v2: keys and values come from a strided convolution. Exact for softmax.
    `drop=("pooling",)` takes the convolution out, and the mechanism then sees every token as key."""

    features = {"pooling": ("sequence_reduction",)}

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        if feature == "pooling":
            module.sequence_reduction_ratio = 1

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        stride = module.sequence_reduction_ratio
        return TokenGrid(args[1] // stride, args[2] // stride)

    def forward(self, hidden_states: Tensor, height: int, width: int, *args: Any, **kwargs: Any) -> Any:
        self.passing.wanted = attentions_wanted(kwargs.get("output_attentions"))
        x, key_grid = hidden_states, self.grid(self, (hidden_states, height, width), Grids())
        source = self.sequence_reduction(x, height, width) if self.sequence_reduction_ratio > 1 else x
        q, k, v = (self.split(t) for t in (self.q_proj(x), self.k_proj(source), self.v_proj(source)))
        out = self.attend(q, k, v, TokenGrid(height, width), key_grid=key_grid, x=x)
        return self.answer(self.mechanism.after_projection(self.o_proj(merge_heads(out)), q))


class HFPvtV2Host(_PooledKeys, PvtV2SelfAttention):
    features = {"pooling": ("spatial_reduction", "layer_norm", "pool", "act")}

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        if feature == "pooling":
            module.spatial_reduction_ratio, module.linear_attention = 1, False

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        stride = module.spatial_reduction_ratio
        return TokenGrid(7, 7) if module.linear_attention else TokenGrid(args[1] // stride, args[2] // stride)

    def _pool(self, picture: Tensor) -> Tensor:
        if self.linear_attention:
            return self.act(self.layer_norm(to_tokens(self.spatial_reduction(self.pool(picture)))))
        return self.layer_norm(to_tokens(self.spatial_reduction(picture)))

    def forward(self, hidden_states: Tensor, height: int, width: int, output_attentions: Any = False) -> Any:
        self.passing.wanted = bool(output_attentions)
        x, grid = hidden_states, TokenGrid(height, width)
        key_grid = self.grid(self, (x, height, width), Grids())
        pooled = self.linear_attention or self.spatial_reduction_ratio > 1
        source = self._pool(grid.to_map(x[:, None])) if pooled else x
        q, k, v = (self.split(t) for t in (self.query(x), self.key(source), self.value(source)))
        out, found = self.answer(self.project_out(self.attend(q, k, v, grid, key_grid=key_grid, x=x), q))
        return (out,) if found is None else (out, found)


class HFSam2Host(MapHost, ChannelsLastHost, Sam2MultiScaleAttention):
    """The encoder of Hugging Face's SAM 2, pictures' and videos': over windows or the whole picture, with max-pooled
    queries where a stage begins. Exact for softmax, any input size. Layers with pooled queries need a mechanism that
    takes fewer queries than keys; a plan can keep them as they are. transformers records the layers' outputs in place
    of attentions here, so asking for these is an error."""

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([POOLED_QUERIES] if module.query_stride else [])

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if attentions_wanted(kwargs.get("output_attentions")):
            raise LinvitError("transformers has no place for SAM 2's attentions: leave out output_attentions")
        grid = key_grid = TokenGrid(hidden_states.shape[1], hidden_states.shape[2])
        x = hidden_states.flatten(1, 2)
        q, k, v = unpack(self.qkv(x), 3, self.num_attention_heads)
        if self.query_stride:
            picture = nn.functional.max_pool2d(grid.to_map(q), self.query_stride)
            grid = grid_of(picture)
            q = grid.from_map(picture, self.num_attention_heads)
        out = self.attend(q, k, v, grid, key_grid=key_grid, x=x)
        return self.project_out(out, q).unflatten(1, (grid.height, grid.width))


class HFHieraHost(MapHost, UnrolledHost, SequenceHost, HieraMaskUnitAttention):
    """Hugging Face's Hiera: inside mask units in the early stages, over the whole picture later, with max-pooled
    queries where a stage begins. Exact for softmax. Any size that its units divide, with `interpolate_pos_encoding`.
    Tokens are kept in the order of pooling; mechanisms that look at the grid or at neighbours get them row by row.
    Layers with pooled queries need a mechanism that takes fewer queries than keys."""

    pooled_by = "query_stride"
    all_strides: Strides = ()

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        strides, every = next(where for attn, where in stages(image.owner) if attn.qkv is module.qkv)
        if image.grid is None:
            return None
        units = (1, 1) if module.use_mask_unit_attn else units_of((image.grid.height, image.grid.width), every)
        return layout(strides, units)[0]

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        follow_embeddings(model)
        for attn, (strides, every) in stages(model):
            attn.strides, attn.all_strides = strides, every

    def units_now(self) -> tuple[int, int]:
        grid = self.token_grid
        return (1, 1) if grid is None else units_of((grid.height, grid.width), self.all_strides)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        out, orders = super()._attend(q, k, v, x), self.orders(k)
        if self.passing.map is not None and orders is not None:
            self.passing.map = self.passing.map[:, :, orders[2].argsort()][..., orders[3].argsort()]
        return out

    def forward(self, hidden_states: Tensor, output_attentions: Any = False) -> Any:
        self.passing.wanted = bool(output_attentions)
        out, found = self.answer(self.run(hidden_states))
        return out, found if found is None else found.unflatten(0, (len(out), -1)).transpose(1, 2)


def stages(model: nn.Module) -> Iterator[tuple[Any, tuple[Strides, Strides]]]:
    """Each attention of the Hiera in a model with the pooling that lies ahead of it, and all of the pooling."""
    for owner in model.modules():
        if isinstance(owner, HieraModel):
            every = tuple((rows, columns) for rows, columns in owner.unroll_schedule)
            encoder: Any = owner.encoder
            layers = [layer.attn for stage in encoder.stages for layer in stage.layers]
            yield from ((attn, (left, every)) for attn, left in ahead(layers, every, "query_stride"))
