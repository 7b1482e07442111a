"""The architecture of the Fair Comparison between Efficient Attentions (Hong et al., 2022), any mechanism in it.

A pyramid of four stages with Swin-T's widths and depths, and a column of one stage. Every head is 32 wide. Position is
XCiT's Fourier encoding, added once after the patch embedding; there is no class token and no relative bias.
The settings are those of the released code, which the published parameter and FLOP counts confirm.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from timm.layers import ClassifierHead, DropPath, Mlp, calculate_drop_path_rates, to_2tuple, trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Mechanism, TokenGrid, create_attention
from linvit.conversion.host import Host
from linvit.errors import LinvitError

EPS = 1e-6


class PatchEmbed(nn.Module):
    """Patches of `patch_size` pixels as channels-last tokens; the right and lower edge are padded with zeros."""

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(dim, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            x = F.pad(x, (0, -width % self.patch_size, 0, -height % self.patch_size))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class FourierPosition(nn.Module):
    """Sines and cosines of the row and the column, each running to 2π over the picture, and a 1×1 convolution."""

    def __init__(self, dim: int, width: int = 32, temperature: float = 10000.0) -> None:
        super().__init__()
        self.width, self.temperature = width, temperature
        self.proj = nn.Conv2d(2 * width, dim, 1)

    def encode(self, places: int, device: torch.device) -> Tensor:
        """`(places, width)`: sine and cosine by turns, two channels to a frequency."""
        position = torch.arange(1, places + 1, device=device, dtype=torch.float32) / (places + EPS) * 2 * math.pi
        steps = torch.arange(0, self.width, 2, device=device, dtype=torch.float32) / self.width
        angle = position[:, None] * self.temperature**-steps
        return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)

    def forward(self, height: int, width: int) -> Tensor:
        weight = self.proj.weight
        rows = self.encode(height, weight.device)[:, None].expand(height, width, -1)
        columns = self.encode(width, weight.device)[None].expand(height, width, -1)
        picture = torch.cat((rows, columns), dim=-1).permute(2, 0, 1)[None]
        return self.proj(picture.to(weight.dtype)).permute(0, 2, 3, 1)


class PatchMerging(nn.Module):
    """Two by two neighbours become one token of twice the channels; an odd edge is padded with zeros."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=EPS)
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        if height % 2 or width % 2:
            x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
            height, width = x.shape[1:3]
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)  # column before row: (0, 0), (1, 0), (0, 1), (1, 1)
        return self.reduction(self.norm(x))


class Attention(Host):
    """The projections around a mechanism: a host from the start, so that a plan can change the mechanism."""

    between = True

    def __init__(self, dim: int, heads: int, grid: TokenGrid, mechanism: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mechanism = create_attention(
            mechanism, heads=heads, head_dim=dim // heads, dim=dim, grid=grid, **dict(options)
        )

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Any) -> TokenGrid:
        return args[1]

    def forward(self, x: Tensor, grid: TokenGrid) -> Tensor:
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, grid, x=x), q)


class Block(nn.Module):
    def __init__(self, attn: Attention, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        dim = attn.proj.out_features
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: TokenGrid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        if self.attn.mechanism.capabilities.between:
            x = self.attn.mechanism.between(x, grid)
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PyramidStage(nn.Module):
    """Patch merging, but for the first stage, and a run of blocks; channels last in and out."""

    def __init__(self, downsample: nn.Module, blocks: list[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        batch, height, width, channels = x.shape
        grid = TokenGrid(height, width)
        x = x.reshape(batch, grid.tokens, channels)
        for block in self.blocks:
            x = checkpoint(block, x, grid) if self.grad_checkpointing and self.training else block(x, grid)
        return x.reshape(batch, height, width, channels)


class FairPyramid(nn.Module):
    """The Fair Comparison's model at any scale. `options` go to the mechanism.

    Any input size works, square or not, unless the mechanism is fixed to the tokens it was built for (Linformer): such
    a model takes pictures of `img_size` only.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        mechanism: str = "softmax",
        options: Mapping[str, Any] = {},
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        dims = [embed_dim * 2**stage for stage in range(len(depths))]
        if len(depths) != len(num_heads):
            raise LinvitError(f"depths has {len(depths)} stages and num_heads {len(num_heads)}: they must agree")
        for dim, heads in zip(dims, num_heads, strict=True):
            if dim % heads:
                raise LinvitError(f"{dim} channels cannot be split into {heads} heads")
        self.num_classes, self.in_chans, self.output_fmt = num_classes, in_chans, "NHWC"
        self.img_size = to_2tuple(img_size)
        self.num_features = self.head_hidden_size = dims[-1]
        self.patch_embed = PatchEmbed(in_chans, embed_dim, patch_size)
        self.position = FourierPosition(embed_dim)
        rates: Iterator[Any] = iter(calculate_drop_path_rates(drop_path_rate, sum(depths)))
        height, width = (-(-side // patch_size) for side in self.img_size)
        self.feature_info: list[dict[str, Any]] = []
        stages = []
        for i, (dim, depth, heads) in enumerate(zip(dims, depths, num_heads, strict=True)):
            if i:
                height, width = -(-height // 2), -(-width // 2)
            grid = TokenGrid(height, width)
            attns = (Attention(dim, heads, grid, mechanism, options) for _ in range(depth))
            blocks = [Block(attn, mlp_ratio, next(rates)) for attn in attns]
            stages.append(PyramidStage(PatchMerging(dims[i - 1], dim) if i else nn.Identity(), blocks))
            self.feature_info.append({"num_chs": dim, "reduction": patch_size * 2**i, "module": f"stages.{i}"})
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(dims[-1], eps=EPS)
        self.head = ClassifierHead(dims[-1], num_classes, global_pool, drop_rate, input_fmt=self.output_fmt)
        self.apply(init_weights)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of the first block; the others have their own of the same kind."""
        return cast(Block, cast(PyramidStage, self.stages[0]).blocks[0]).attn.mechanism

    @property
    def any_size(self) -> bool:
        """Whether the mechanism lets pictures of any size through."""
        return self.mechanism.capabilities.any_tokens

    def embed(self, x: Tensor) -> Tensor:
        if not self.any_size and tuple(x.shape[-2:]) != self.img_size:
            raise LinvitError(
                f"{self.mechanism.name} fixes this model to {self.img_size[0]}×{self.img_size[1]} pixels, got "
                f"{x.shape[-2]}×{x.shape[-1]}: build it with img_size=({x.shape[-2]}, {x.shape[-1]})"
            )
        x = self.patch_embed(x)
        return x + self.position(x.shape[1], x.shape[2])

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.stages(self.embed(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The stages' outputs, before merging; with `norm` the last one normalised. As timm calls it."""
        if output_fmt not in ("NCHW", "NHWC"):
            raise LinvitError(f"intermediates come as NCHW or NHWC, not {output_fmt}")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self.embed(x)
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                out = self.norm(x) if norm and i == len(self.stages) - 1 else x
                intermediates.append(out.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else out)
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages that `indices` do not need, the final norm and the head."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()  # type: ignore[assignment]
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            cast(PyramidStage, stage).grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer-wise learning rates, as timm reads them."""
        downsample, norm = (r"^stages\.(\d+)\.downsample", (0,)), (r"^norm", (99999,))
        fine = [downsample, (r"^stages\.(\d+)\.blocks\.(\d+)", None), norm]
        return {"stem": r"^patch_embed|^position", "blocks": r"^stages\.(\d+)" if coarse else fine}


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
