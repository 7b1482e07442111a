"""Relative positions by tables and small MLPs, also on grids they were not learned on: exact in mechanisms with logits,
given up with `drop=("relative_bias",)` elsewhere. A model may hold one for all its layers."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed, RelPosBias, RelPosMlp
from timm.layers.pos_embed_rel import RelPosBiasTf, gen_relative_log_coords, gen_relative_position_index
from timm.models import beit, maxxvit
from timm.models import vision_transformer_sam as sam
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids, stem
from linvit.conversion.host import (
    FEATURES,
    Ask,
    ChannelsLastHost,
    Host,
    PictureHost,
    SequenceHost,
    given,
    grid_of,
    has_logits,
    to_tokens,
    unpack,
)
from linvit.conversion.hosts.vit import rotation


def table_bias(table: Tensor, window: tuple[int, int], grid: TokenGrid) -> Tensor:
    """The bias `(1, heads, tokens, tokens)` of a table `(offsets, heads)` learned on `window`, one row per offset.

    On another grid the rows are resized bicubically as the picture they are. The last three rows of a model with a
    class token stand for class to patch, patch to class and class to class; they have no size.
    """
    size, learned = (grid.height, grid.width), (2 * window[0] - 1, 2 * window[1] - 1)
    if size != tuple(window):
        picture = table[: learned[0] * learned[1]].t().unflatten(-1, learned)
        picture = F.interpolate(picture[None], (2 * size[0] - 1, 2 * size[1] - 1), mode="bicubic")[0]
        table = torch.cat((picture.flatten(-2).t(), table[learned[0] * learned[1] :]))
    index = gen_relative_position_index(size, class_token=grid.prefix > 0, device=table.device)
    return table[index].permute(2, 0, 1)[None]


def resized_bias(rel_pos: Any, grid: TokenGrid) -> Tensor:
    """The bias `(1, heads, tokens, tokens)` of one of timm's relative position modules on another grid than its own.

    Tables are resized; an MLP of log-spaced offsets is asked at the new ones, on the scale it was trained with.
    """
    size = (grid.height, grid.width)
    if isinstance(rel_pos, RelPosMlp):
        learned = rel_pos.pretrained_window_size if rel_pos.pretrained_window_size[0] else rel_pos.window_size
        like = rel_pos.rel_coords_log
        offsets = gen_relative_log_coords(size, learned, rel_pos.mode, device=like.device, dtype=like.dtype)
        values = rel_pos.mlp(offsets).flatten(0, 1)
        bias = rel_pos.bias_act(values[gen_relative_position_index(size, device=like.device)].permute(2, 0, 1))
        bias = bias if rel_pos.bias_gain is None else rel_pos.bias_gain * bias
        return F.pad(bias, (grid.prefix, 0, grid.prefix, 0))[None]
    table = rel_pos.relative_position_bias_table
    if isinstance(rel_pos, RelPosBiasTf):  # its offsets run from query to key, the others from key to query
        table = table.flip(-2, -1).flatten(1).t()
    return table_bias(table, rel_pos.window_size, grid)


def on_grid(module: Any, grid: TokenGrid | None) -> bool:
    """Whether this is the grid that a module's positions were learned on; where it is not known they are taken so."""
    return grid is None or (grid.height, grid.width) == tuple(module.window_size)


class _FollowsGrid:
    """A table or an MLP of relative positions, for the grid of the image now passing through."""

    grids: Grids | None = None

    @property
    def now(self) -> TokenGrid | None:
        return self.grids.grid if self.grids is not None else None

    def get_bias(self) -> Tensor:
        return super().get_bias() if on_grid(self, self.now) else resized_bias(self, self.now)  # type: ignore


class GridRelPosBias(_FollowsGrid, RelPosBias):
    pass


class GridRelPosMlp(_FollowsGrid, RelPosMlp):
    pass


class GridBeitBias(_FollowsGrid, beit.RelativePositionBias):
    def forward(self) -> Tensor:
        return super().forward() if on_grid(self, self.now) else resized_bias(self, self.now)  # type: ignore[arg-type]


FOLLOWERS: dict[type[nn.Module], type[Any]] = {
    RelPosBias: GridRelPosBias,
    RelPosMlp: GridRelPosMlp,
    beit.RelativePositionBias: GridBeitBias,
}


class SharedBiasHost(SequenceHost):
    """Relative positions of the layer's own, or one module of the model that hands its bias to all layers.

    The shared one goes once no layer uses it. A model whose only positions are these takes any image size.
    """

    shared: ClassVar[str]  # the model's attribute
    uses_shared = True

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        asks = super().asks(model, module)
        bias = FEATURES["relative_bias"]
        if bias not in asks and getattr(module, "uses_shared", True) and given(model, module, cls.shared):
            asks.append(bias)
        return asks

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        if feature == "relative_bias":
            module.uses_shared = False

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        for owner in model.modules():
            inside = [module for module in owner.modules() if isinstance(module, cls.original)]
            grids = next((module.grids for module in inside if isinstance(module, cls)), None)
            if grids is None:
                continue
            take_any_size(owner)
            if hasattr(owner, cls.shared) and not any(getattr(m, "uses_shared", True) for m in inside):
                setattr(owner, cls.shared, None)
            if stem(owner) is not None:
                for module in list(owner.modules()):
                    if type(module) in FOLLOWERS:
                        module.__class__ = FOLLOWERS[type(module)]
                        module.grids = grids  # type: ignore[assignment]


def take_any_size(owner: nn.Module) -> None:
    """Let a model without absolute positions take images of any size: its patch embedding insists on one."""
    embed = stem(owner)
    if getattr(owner, "pos_embed", None) is None and isinstance(embed, PatchEmbed):
        embed.strict_img_size = False


class BeitHost(SharedBiasHost, beit.Attention):
    """BEiT's attention, with a table of relative positions in each layer or one that all layers share.

    Exact for softmax. The bias is exact in mechanisms with logits; others give it up with `drop=("relative_bias",)`,
    and the shared table goes once no layer uses it. Any input size: on another grid the table is resized bicubically.
    """

    features = {"relative_bias": ("relative_position_bias_table", "relative_position_index")}
    shared = "rel_pos_bias"

    def _bias(self, shared: Tensor | None) -> Tensor | None:
        if not has_logits(self.mechanism):
            return None
        shared, grid = shared if self.uses_shared else None, self.token_grid
        if self.relative_position_bias_table is None:
            return shared
        own = self._get_rel_pos_bias() if grid is None or on_grid(self, grid) else resized_bias(self, grid)
        return own if shared is None else own + shared

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, self.token_grid, bias=self._bias(shared_rel_pos_bias), x=x), q)


class RelPosHost(SharedBiasHost, RelPosAttention):
    """`RelPosAttention` of timm's ViT-relpos and ViT-SRelPos: a table or a small MLP of relative positions, in each
    layer or shared by all.

    Exact for softmax. The bias is exact in mechanisms with logits; others give it up with `drop=("relative_bias",)`,
    and the shared one goes once no layer uses it. Any input size: a table is resized bicubically, the MLP is asked at
    the new offsets, on the scale it was trained with.
    """

    features = {"relative_bias": ("rel_pos",)}
    shared = "shared_rel_pos"
    rel_pos: Any

    def _bias(self, shared: Tensor | None) -> Tensor | None:
        if not has_logits(self.mechanism):
            return None
        if self.rel_pos is not None:
            return self.rel_pos.get_bias()
        return shared if self.uses_shared else None

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.project_out(self.attend(q, k, v, self.token_grid, bias=self._bias(shared_rel_pos), x=x), q)


def module_bias(rel_pos: Any, grid: TokenGrid) -> Tensor:
    """The bias `(1, heads, tokens, tokens)` of one of timm's relative position modules, on any grid."""
    if not on_grid(rel_pos, grid):
        return resized_bias(rel_pos, grid)
    bias = rel_pos.get_bias()
    return bias if bias.ndim == 4 else bias[None]


class _MaxxBase(Host):
    """What the two of MaxxViT share: everything but the layout of pictures."""

    features = {"relative_bias": ("rel_pos",)}

    @classmethod
    def shape(cls, module: Any) -> Shape:
        window = None if module.rel_pos is None else TokenGrid(*module.rel_pos.window_size)
        return replace(super().shape(module), grid=window)

    def _attend(self, qkv: Tensor, x: Tensor, grid: TokenGrid, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        """From projected tokens `(batch, tokens, channels)` to the mixed heads, and the queries."""
        if self.head_first:
            q, k, v = self.split_heads(qkv).chunk(3, dim=-1)
        else:
            q, k, v = unpack(qkv, 3, self.num_heads)
        bias = shared
        if self.rel_pos is not None:
            bias = module_bias(self.rel_pos, grid) if has_logits(self.mechanism) else None
        return self.attend(q, k, v, grid, bias=bias, x=x), q


class MaxxPictureHost(_MaxxBase, PictureHost, maxxvit.Attention2d):
    """MaxViT, CoAtNet and MaxxViT: `Attention2d` on pictures and `AttentionCl` with channels last, whole, in windows or
    on a dilated grid.

    Exact for softmax. The relative bias (a table, TensorFlow's table, or an MLP of log-spaced offsets) is exact in
    mechanisms with logits and given up with `drop=("relative_bias",)` elsewhere. CoAtNet takes any input size: tables
    are resized, the MLP is asked for the new offsets. MaxViT takes sizes that its window and grid divide, as the
    original.
    """

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid = grid_of(x)
        out, q = self._attend(to_tokens(self.qkv(x)), to_tokens(x), grid, shared_rel_pos)
        return self.finish(self.proj(grid.to_map(out)), q)


class MaxxHost(_MaxxBase, ChannelsLastHost, maxxvit.AttentionCl):
    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid, tokens = TokenGrid(x.shape[1], x.shape[2]), x.flatten(1, 2)
        out, q = self._attend(self.qkv(tokens), tokens, grid, shared_rel_pos)
        return self.project_out(out, q).unflatten(1, (grid.height, grid.width))


class SAMHost(ChannelsLastHost, sam.Attention):
    """SAM's image encoder: attention over windows or the whole picture, with a decomposed relative position or rotary.

    Exact for softmax. The relative position depends on the query; it is exact in mechanisms with logits and given up
    with `drop=("relative_bias",)` elsewhere. Rotary position is honoured as in EVA-02. Any input size, as in the
    original, and with rotary position too. Windows at the border are padded with zero tokens, which are keys like any
    other: the original attends to them as well.
    """

    rope: Any
    features = {"relative_bias": ("rel_pos_h", "rel_pos_w"), "rotary": ("rope",)}

    def _rotation(self, grid: TokenGrid, like: Tensor) -> Tensor:
        size = [grid.height, grid.width]
        if list(self.rope.feat_shape) == size:
            return self.rope.get_embed()
        return self.rope._get_pos_embed_values(size, device=like.device, dtype=like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[1], x.shape[2])
        grid, x = TokenGrid(*size), x.flatten(1, 2)
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None
        if self.use_rel_pos and self.rel_pos_h is not None and has_logits(self.mechanism):
            bias = sam.get_decomposed_rel_pos_bias(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.unflatten(0, (x.shape[0], self.num_heads))
        rotary = None if self.rope is None else rotation(self._rotation(grid, q), half=False)
        return self.project_out(self.attend(q, k, v, grid, bias=bias, x=x, rotary=rotary), q).unflatten(1, size)
