"""Sequences of all tokens of a picture, projected in one go: the plain case and what some models do beside it, talking
heads, positional attention, channels that attend to channels; and class attention, where one token asks all others."""

from dataclasses import replace
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models import cait, coat, convit, crossvit, edgenext, metaformer, nest, tnt, volo, xcit
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import ONE_QUERY, Host, SequenceHost, unpack


class PlainHost(SequenceHost):
    """The plain case: one projection in, one out, and a sequence between."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, self.token_grid, x=x), q)


class MetaFormerHost(PlainHost, metaformer.Attention):
    """The attention of MetaFormer models: CAFormer and others with attention stages. Exact for softmax, any input size.

    Stages that mix tokens by pooling or convolution have no attention and stay as they are.
    """


class NestHost(SequenceHost, nest.Attention):
    """NesT's attention inside blocks of the picture. Exact for softmax.

    The model's position tables fix the input size, as in the original. Its output has the channels of all heads
    interleaved, which the host keeps.
    """

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.flatten(0, 1)
        q, k, v = self.project(blocks)
        out = self.attend(q, k, v, self.token_grid, x=blocks)
        return self.finish(self.proj(out.permute(0, 2, 3, 1).flatten(2)), q).unflatten(0, x.shape[:2])


class TNTHost(PlainHost, tnt.Attention):
    """TNT's attention, inside each patch and among the patches. Exact for softmax, at the one image size that TNT was
    built for."""

    token_grid: TokenGrid | None = None  # type: ignore[assignment]

    @classmethod
    def shape(cls, module: Any) -> Shape:
        width = module.v.in_features
        return Shape(module.num_heads, module.head_dim, width // module.num_heads, dim=width)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        inside = any(block.attn_in.qk is module.qk for block in image.owner.blocks)
        return TokenGrid(*image.owner.pixel_embed.new_patch_size) if inside else image.grid

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        for owner in model.modules():
            if isinstance(owner, tnt.TNT):
                block: Any
                for block in owner.blocks:
                    block.attn_in.token_grid = TokenGrid(*owner.pixel_embed.new_patch_size)
                    block.attn_out.token_grid = TokenGrid(*owner.pixel_embed.grid_size, prefix=1)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return *unpack(self.qk(x), 2, self.num_heads), self.split_heads(self.v(x))


class GPSAHost(SequenceHost, convit.GPSA):
    """ConViT: gated positional self-attention in the early layers, plain self-attention behind them.

        out = (1 − g) · attend(q, k, v) + g · position(v),  g = σ(gate) per head

    Exact for softmax, at the image size the model was built for. The positional half does not depend on the image and
    is kept exactly whatever the mechanism: its logits are a sum of a function of the row offset and one of the column
    offset, so its softmax is one along the rows times one along the columns, and costs N·(H + W) and not N². Only the
    content half gets the mechanism.
    """

    def _along(self, length: int, weight: Tensor, square: Tensor) -> Tensor:
        """The positional map along one axis, `(heads, length, length)`. The bias cancels, as in the original."""
        steps = torch.arange(length, device=weight.device, dtype=weight.dtype)
        offset = steps[None, :] - steps[:, None]
        logits = weight[:, None, None] * offset + square[:, None, None] * offset**2
        return (logits + self.pos_proj.bias[:, None, None]).softmax(-1)

    def _position(self, v: Tensor, grid: TokenGrid) -> Tensor:
        across, down, square = self.pos_proj.weight.unbind(1)
        rows, columns = self._along(grid.height, down, square), self._along(grid.width, across, square)
        picture = v.unflatten(2, (grid.height, grid.width))
        picture = torch.einsum("hxy,bhryd->bhrxd", columns, picture)
        return torch.einsum("hrs,bhsxd->bhrxd", rows, picture).flatten(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.token_grid
        assert grid is not None
        q, k = unpack(self.qk(x), 2, self.num_heads)
        v = self.split_heads(self.v(x))
        gate = self.gating_param.sigmoid()[:, None, None]
        return self.project_out((1 - gate) * self.attend(q, k, v, grid, x=x) + gate * self._position(v, grid), q)


class MHSAHost(PlainHost, convit.MHSA):
    # The class token joins behind the positional layers, so there is one prefix token here and none there.

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return None if image.grid is None else replace(image.grid, prefix=1)

    @property
    def token_grid(self) -> TokenGrid | None:
        return None if self.grids is None else self.grid(self, (), self.grids)


class CoaTHost(Host, coat.FactorAttnConvRelPosEnc):
    """CoaT's factorised attention with convolutional relative position. Native is `efficient` in its variant
    `factorised`.

        out = q / √d · (softmax_N(k)ᵀ · v) + q ∘ conv(v)

    Exact for that. The second term looks at neighbours only and stays with every mechanism. The original takes one
    input size because its patch embeddings insist on it; a converted model follows the image.
    """

    native = "efficient"
    crpe: Any

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"variant": "factorised"} if mechanism == "efficient" else {}

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid(args[1][0], args[1][1], prefix=1)

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        embeds = (m for owner in model.modules() if isinstance(owner, coat.CoaT) for m in owner.modules())
        for embed in embeds:
            if isinstance(embed, PatchEmbed) and embed.strict_img_size:
                embed.strict_img_size = False
                embed.register_forward_pre_hook(follow_size)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.project(x)
        out = self.attend(q, k, v, TokenGrid(size[0], size[1], prefix=1), x=x) + self.crpe(q, v, size=size)
        return self.project_out(out, q)


def follow_size(embed: Any, args: tuple[Any, ...]) -> None:
    """Forward pre-hook: CoaT asks its patch embeddings for the size of the picture."""
    embed.grid_size = embed.dynamic_feat_size((args[0].shape[-2], args[0].shape[-1]))


class XCAHost(PlainHost, xcit.XCA):
    """XCiT's `XCA`, where channels attend to channels: native is the mechanism `xca`, not softmax.

    Exact for `xca`: q and k get unit length over the tokens and the layer's own temperature here, so that its weight
    stays where it was; the mechanism is `xca` in its plain variant, and the √N undoes that variant's scale. Any other
    mechanism lets tokens attend to tokens with the same projections, which is a new layer to be trained; there is no
    temperature in it, so it asks for `drop=("temperature",)`. XCiT's class attention is CaiT's. Any input size.
    """

    native = "xca"
    features = {"temperature": ("temperature",)}

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"variant": "fair"} if mechanism == "xca" and module.temperature is not None else {}

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().project(x)
        if self.temperature is not None:
            q, k = F.normalize(q, dim=-2) * self.temperature * x.shape[1] ** 0.5, F.normalize(k, dim=-2)
        return q, k, v

    def no_weight_decay(self) -> set[str]:
        return set() if self.temperature is None else {"temperature"}


class EdgeNeXtHost(XCAHost, edgenext.CrossCovarianceAttn):
    """EdgeNeXt's cross-covariance attention, where channels attend to channels: native is the mechanism `xca`.

    It is XCiT's layer and hosted the same way: exact for `xca`, with the layer's own temperature; any other mechanism
    lets tokens attend to tokens with the same projections, a new layer to be trained, for `drop=("temperature",)`. Any
    input size.
    """


class TalkingHeadHost(PlainHost, cait.TalkingHeadAttn):
    """CaiT's talking-head attention, and the class attention of CaiT, XCiT and VOLO.

    Talking heads mix the logits and the weights of all heads, which only softmax has: exact there, given up elsewhere
    with `drop=("talking_heads",)`. In class attention one query, the class token, asks all tokens; that is linear in
    the tokens with any mechanism. It is exact for softmax; a mechanism that needs as many keys as queries, or that
    knows places, of which the class token has none, leaves it as it is, and the report says so.
    """

    features = {"talking_heads": ("proj_l", "proj_w")}

    def forward(self, x: Tensor) -> Tensor:
        if self.proj_l is None:
            return super().forward(x)
        q, k, v = self.project(x)
        logits = (q @ k.transpose(-2, -1) * self.scale).movedim(1, -1)
        return self.project_out(self.proj_w(self.proj_l(logits).softmax(-2)).movedim(-1, 1) @ v, q)


class ClassTokenHost(Host):
    """The class token, which comes first, asks all tokens."""

    needs = (ONE_QUERY,)

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        return TokenGrid.line(args[0].shape[1])

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.split_heads(self.k(x)), self.split_heads(self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        q, (k, v) = self.split_heads(self.q(first)), self._keys_and_values(x)
        return self.project_out(self.attend(q, k, v, None, x=first), q)


class ClassAttnHost(ClassTokenHost, cait.ClassAttn):
    pass


class VOLOClassHost(ClassTokenHost, volo.ClassAttention):
    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, ...]:
        return unpack(self.kv(x), 2, self.num_heads)


class CrossViTHost(SequenceHost, crossvit.CrossAttention):
    """CrossViT's cross-attention: the class token of one branch asks the patches of the other.

    One query is linear in the tokens with any mechanism. Exact for softmax; a mechanism that needs as many keys as
    queries leaves it as it is. The self-attention of the branches is timm's shared one. Any input size, as the model
    rescales the image itself.
    """

    needs = (ONE_QUERY,)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        q, k, v = (self.split_heads(t) for t in (self.wq(first), self.wk(x), self.wv(x)))
        return self.project_out(self.attend(q, k, v, TokenGrid(1, 1), key_grid=self.token_grid, x=first), q)
