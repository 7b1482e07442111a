"""The ViT-Adapter against its steps written out, with transformers' deformable attention in them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import linvit
from linvit.attention import TokenGrid
from linvit.models.backbones import make_backbone
from linvit.models.backbones.adapter import Adapter, references
from tests.conversion.families import permitting
from tests.models.backbones.kinds import VIT, Kind, images

DEIT = Kind("deit_tiny_patch16_224", {**VIT, "depth": 6})


def test_counts_of_the_tiny_adapter() -> None:
    """Spatial prior 1.17 M, injectors 4 × 0.117 M, extractors 6 × 0.108 M, deconvolution 0.148 M: 2.44 M."""
    with torch.device("meta"):
        backbone = make_backbone("deit_tiny_patch16_224", "adapter")
    adapter: Any = backbone.pyramid

    def count(part: Any) -> int:
        return sum(p.numel() for p in part.parameters())

    assert (count(adapter.prior), count(adapter.injectors[0]), count(adapter.extractors[0])) == (
        1171520,
        116760,
        108312,
    )
    assert (count(adapter.up), count(adapter)) == (147648, 2438192)
    assert adapter.ends == (3, 6, 9, 12)
    assert "norm.weight" not in backbone.trunk.state_dict() and "cls_token" not in backbone.trunk.state_dict()


def attend(layer: Any, query: Tensor, places: Tensor, tokens: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
    """transformers' deformable attention with the weights of ours."""
    mask2former = pytest.importorskip("transformers.models.mask2former.modeling_mask2former")
    batch, queries, _ = query.shape
    split = (batch, queries, layer.heads, len(shapes), 4)
    offsets = layer.offsets(query).view(*split, 2)
    weights = layer.weights(query).view(batch, queries, layer.heads, -1).softmax(-1).view(split)
    sides = torch.tensor([(width, height) for height, width in shapes])
    where = places[None, :, None, None, None] + offsets / sides[None, None, None, :, None]
    value = layer.value(tokens).view(batch, tokens.shape[1], layer.heads, -1)
    return layer.out(mask2former.multi_scale_deformable_attention(value, shapes, where, weights))


def points(height: int, width: int) -> Tensor:
    """x and y of the centres, as the release lays them out."""
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack((x.flatten(), y.flatten()), dim=-1).double()


@torch.no_grad()
def steps(adapter: Any, trunk: Any, x: Tensor, every_stage: bool) -> list[Tensor]:
    """The released forward pass, for sides that divide by 32."""
    height, width = x.shape[-2] // 16, x.shape[-1] // 16
    shapes = [(2 * height, 2 * width), (height, width), (height // 2, width // 2)]
    s4 = adapter.prior.stem(x)
    s8 = adapter.prior.stages[0](s4)
    s16 = adapter.prior.stages[1](s8)
    s32 = adapter.prior.stages[2](s16)
    c1, c2, c3, c4 = (project(s) for project, s in zip(adapter.prior.projections, (s4, s8, s16, s32), strict=True))
    c = torch.cat([m.flatten(2).transpose(1, 2) + e for m, e in zip((c2, c3, c4), adapter.level_embed, strict=True)], 1)
    tokens = trunk.patch_embed.proj(x).flatten(2).transpose(1, 2)
    table = trunk.pos_embed.reshape(1, 4, 4, -1).permute(0, 3, 1, 2).float()
    table = F.interpolate(table, (height, width), mode="bicubic", antialias=True).double()
    tokens = tokens + table.flatten(2).transpose(1, 2)
    from_pyramid = torch.cat([points(*shape) for shape in shapes])
    seen = []

    def extract(layer: Any, c: Tensor) -> Tensor:
        c = c + attend(layer.attention, layer.query_norm(c), from_pyramid, layer.norm(tokens), [(height, width)])
        hidden = layer.mlp.widen(layer.mlp_norm(c))
        n = hidden.shape[1] // 21
        parts = hidden[:, : 16 * n], hidden[:, 16 * n : 20 * n], hidden[:, 20 * n :]
        maps = [p.transpose(1, 2).reshape(len(p), -1, *shape) for p, shape in zip(parts, shapes, strict=True)]
        hidden = torch.cat([layer.mlp.depthwise(m).flatten(2).transpose(1, 2) for m in maps], 1)
        return c + layer.mlp.narrow(F.gelu(hidden))

    for i, blocks in enumerate((trunk.blocks[:1], trunk.blocks[1:3], trunk.blocks[3:4], trunk.blocks[4:])):
        inject = adapter.injectors[i]
        read = attend(inject.attention, inject.query_norm(tokens), points(height, width), inject.norm(c), shapes)
        tokens = tokens + inject.gamma * read
        for block in blocks:
            tokens = block(tokens)
        c = extract(adapter.extractors[i], c)
        seen.append(tokens.transpose(1, 2).reshape(len(x), -1, height, width))
    for layer in adapter.more_extractors:
        c = extract(layer, c)
    n = c.shape[1] // 21
    parts = c[:, : 16 * n], c[:, 16 * n : 20 * n], c[:, 20 * n :]
    maps = [p.transpose(1, 2).reshape(len(p), -1, *shape) for p, shape in zip(parts, shapes, strict=True)]
    maps = [c1 + adapter.up(maps[0]), *maps]
    out = []
    for i, (level, scale, norm) in enumerate(zip(maps, (4, 2, 1, 0.5), adapter.norms, strict=True)):
        added = seen[i] if every_stage else seen[-1]
        out.append(norm(level + F.interpolate(added, scale_factor=scale, mode="bilinear")))
    return out


@pytest.mark.parametrize("every_stage", (False, True))
def test_against_the_steps_written_out(every_stage: bool) -> None:
    backbone = DEIT.build("adapter", every_stage=every_stage, heads=4, stem_width=8).double()
    x = images(64, 96).double()
    assert (backbone.pyramid.ends, backbone.channels) == ((1, 3, 4, 6), (48,) * 4)  # type: ignore[union-attr]
    wanted = steps(backbone.pyramid, backbone.trunk, x, every_stage)
    for found, level in zip(backbone(x), wanted, strict=True):
        torch.testing.assert_close(found, level)


@pytest.mark.parametrize(
    "name", ("deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3")
)
def test_any_size_and_no_parameter_idle(name: str) -> None:
    args = {**VIT, "img_size": 56} if "patch14" in name else VIT
    backbone = Kind(name, args).build("adapter", heads=4, stem_width=8, drop_path=0.1).train()
    maps = backbone(images(75, 98))
    assert [tuple(level.shape[1:]) for level in maps] == [(48, -(-75 // s), -(-98 // s)) for s in (4, 8, 16, 32)]
    torch.stack([(level * torch.randn_like(level)).sum() for level in maps]).sum().backward()
    assert [key for key, p in backbone.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    linvit.convert(backbone.eval(), permitting("qt"), size=64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert all(level.isfinite().all() for level in backbone(images(75, 98)))
    host: Any = backbone.trunk.get_submodule("blocks.0.attn")
    patch = backbone.layout.strides[0]
    assert host.token_grid == TokenGrid(-(-75 // patch), -(-98 // patch), 0)


@torch.no_grad()
def test_a_converted_name_loses_its_class_token_too() -> None:
    """Its hosts were told of one when they were made."""
    backbone = Kind("castling_deit_tiny", VIT).build("adapter", heads=4, stem_width=8)
    backbone(images(64, 80))
    host: Any = backbone.trunk.get_submodule("blocks.0.attn")
    assert host.token_grid == TokenGrid(4, 5, 0)


@torch.no_grad()
def test_injectors_begin_with_nothing() -> None:
    torch.manual_seed(0)
    backbone = make_backbone("deit_tiny_patch16_224", "adapter", **VIT).eval()
    seen: list[Tensor] = []
    backbone.trunk.get_submodule("blocks.3").register_forward_hook(lambda module, args, out: seen.append(out))
    backbone(images(64, 64))
    backbone.trunk.forward_intermediates(images(64, 64), indices=1)  # type: ignore[operator]
    torch.testing.assert_close(*seen)
    assert isinstance(backbone.pyramid, Adapter) and not backbone.pyramid.injectors[0].gamma.any()  # type: ignore[union-attr,operator]


def test_places_are_counted_in_pixels() -> None:
    """The centre of a patch of 14 pixels, on maps whose last place ends beyond the image."""
    found = references([(2, 3)], [14], [(4, 6), (2, 3)], [8, 16], torch.device("cpu"))
    assert found.shape == (6, 2, 2)
    torch.testing.assert_close(found[4, 0], torch.tensor([21 / 48, 21 / 32]))
    torch.testing.assert_close(found[5, 1], torch.tensor([35 / 48, 21 / 32]))
