"""Every family as a backbone: any size in, four maps out, no parameter idle, and timm's own maps where it has them."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit
from linvit import LinvitError
from linvit.attention import create_attention
from linvit.models.backbones import Backbone, make_backbone
from linvit.models.backbones.maps import inside, to_stride
from linvit.models.backbones.trunks import maps_of
from tests.conversion.families import permitting
from tests.models.backbones.kinds import KINDS, PYRAMIDS, VIT, Kind, images, moved

DEIT = Kind("deit_tiny_patch16_224", VIT)
LEVELS = (4, 8, 16, 32)
OTHERS = ("densenet121", "mvitv2_tiny")  # the first has no one model; the second has other positions than timm's


def sizes_of(maps: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(level.shape[1:]) for level in maps]


def expected(backbone: Backbone, height: int, width: int) -> list[tuple[int, ...]]:
    return [(c, -(-height // s), -(-width // s)) for c, s in zip(backbone.channels, LEVELS, strict=True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_size_any_precision_linear_too(kind: Kind) -> None:
    backbone = kind.build()
    assert (backbone.layout.multiple, backbone.layout.size) == (kind.multiple, kind.only)
    assert backbone.strides == LEVELS
    x, (height, width) = images(*kind.size), kind.size
    maps = backbone.train()(x)
    assert sizes_of(maps) == expected(backbone, height, width)
    torch.stack([(level * torch.randn_like(level)).sum() for level in maps]).sum().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    backbone.eval()
    with torch.no_grad():
        plain = backbone(x)
        with torch.autocast("cpu", torch.bfloat16):
            coarse = backbone(x)
        for level, other in zip(plain, coarse, strict=True):
            assert (other.float() - level).norm() < 0.1 * level.norm()
        if kind.name == "densenet121":
            return  # has no attention
        linvit.convert(backbone, permitting("stella"), size=kind.only or (96, 128))
        turned = backbone(x)
    assert sizes_of(turned) == expected(backbone, height, width)
    assert all(level.isfinite().all() for level in turned)
    assert kind.name.startswith("mixa") or not torch.equal(turned[-1], plain[-1])


def flat(name: str) -> str:
    return name.replace(".", "_")


@pytest.mark.parametrize("kind", [k for k in PYRAMIDS if k.name not in OTHERS], ids=str)
@torch.no_grad()
def test_timms_own_maps(kind: Kind) -> None:
    """At a size that timm takes; an odd one gives those of the image padded with zeros, cropped."""
    backbone = kind.build()
    known = {"strict_img_size": False, "always_partition": True} if "swin" in kind.name else {}
    indices = backbone.layout.indices
    timms: Any = timm.create_model(kind.name, features_only=True, out_indices=indices, **kind.args, **known).eval()
    ours = {flat(key): tensor for key, tensor in backbone.trunk.state_dict().items()}  # timm joins some names by _
    timms.load_state_dict({key: ours[flat(key).removeprefix("model_")] for key in timms.state_dict()})
    height, width = kind.only or (96 if kind.multiple < 64 else 64, 128)

    def theirs(x: Tensor) -> list[Tensor]:
        return [level.permute(0, 3, 1, 2) if "swin" in kind.name else level for level in timms(x)]

    reference = theirs(images(height, width))
    if backbone.layout.strides != LEVELS:
        pairs = zip(reference, backbone.layout.strides, LEVELS, strict=True)
        reference = [to_stride(level, have, want, (height, width)) for level, have, want in pairs]
    for found, level in zip(backbone(images(height, width)), reference, strict=True):
        torch.testing.assert_close(found, level)
    if kind.multiple > 1 or kind.only:
        height, width = height - 5, width - 9
        odd = images(height, width)
        whole = kind.only or (-(-height // kind.multiple) * kind.multiple, -(-width // kind.multiple) * kind.multiple)
        padded = torch.zeros(2, 3, *whole)
        padded[..., :height, :width] = odd
        for stride, found, level in zip(LEVELS, backbone(odd), theirs(padded), strict=True):
            torch.testing.assert_close(found, level[..., : -(-height // stride), : -(-width // stride)])


@torch.no_grad()
def test_a_plain_trunk_gives_timms_last_map() -> None:
    backbone = DEIT.build()
    timms: Any = timm.create_model(DEIT.name, **VIT, dynamic_img_size=True, num_classes=0).eval()
    timms.load_state_dict(backbone.trunk.state_dict(), strict=False)
    (last,) = maps_of(backbone.trunk, images(96, 112), backbone.layout.indices)
    tokens = timms.forward_intermediates(images(96, 112), indices=1, intermediates_only=True)[0]
    torch.testing.assert_close(last, tokens)


@pytest.mark.parametrize("kind", [k for k in PYRAMIDS if k.name in ("efficientvit_b1", "qtvit_1")], ids=str)
def test_counts_are_the_papers(kind: Kind) -> None:
    """No classifier and no convolution in front of it: stem and stages."""
    with torch.device("meta"):
        whole: Any = timm.create_model(kind.name, **kind.args)
    counted = [p.numel() for part in (whole.stem, whole.stages) for p in part.parameters()]
    assert sorted(p.numel() for p in kind.build().parameters()) == sorted(counted)


def test_maps_are_resized_in_place() -> None:
    """A ramp over the image's pixels stays the ramp."""
    size = (75, 91)
    rows = (torch.arange(11) + 0.5)[:, None] * 7
    columns = (torch.arange(13) + 0.5) * 7
    ramp = (rows + 2 * columns)[None, None]
    for stride in (4, 8, 16):
        found = to_stride(ramp, 7, stride, size)[0, 0]
        assert found.shape == (-(-75 // stride), -(-91 // stride))
        y, x = (torch.arange(side) + 0.5 for side in found.shape)
        wanted = y[:, None] * stride + 2 * x * stride
        torch.testing.assert_close(found[1:-1, 1:-1], wanted[1:-1, 1:-1])


def test_which_places_are_inside() -> None:
    found = inside(torch.tensor([[17, 32], [64, 1]]), 16, (4, 4))
    assert found[0, 0].tolist() == [[True, True, False, False]] * 2 + [[False] * 4] * 2
    assert found[1, 0].tolist() == [[True, False, False, False]] * 4


MASKED = ("", "stella", "relu_linear", "flow", "mobile", "castling", "hydra")


@pytest.mark.parametrize("mechanism", MASKED)
@torch.no_grad()
def test_padding_is_not_seen(mechanism: str) -> None:
    """Without positions, which follow the padded image, an image has the same maps alone and padded in a batch."""
    backbone = make_backbone(DEIT.name, **VIT, pos_embed="none")
    moved(backbone).eval()
    if mechanism:
        linvit.convert(backbone, mechanism, size=64)
    assert backbone.masks_padding
    sizes = [(96, 64), (41, 112), (80, 80)]
    alone = [images(height, width, 1) for height, width in sizes]
    batch = torch.full((3, 3, 96, 112), 50.0)
    for i, (image, (height, width)) in enumerate(zip(alone, sizes, strict=True)):
        batch[i, :, :height, :width] = image[0]
        batch[i, :, height : -(-height // 16) * 16, :width] = 0  # zeros up to the next patch, as the image alone gets
    together = backbone(batch, torch.tensor(sizes))
    for i, image in enumerate(alone):
        for level, single in zip(together, backbone(image), strict=True):
            height, width = single.shape[-2:]
            torch.testing.assert_close(level[i, :, :height, :width], single[0], atol=2e-5, rtol=2e-5)
    unmasked = backbone(batch)
    assert not torch.allclose(unmasked[3][1], together[3][1], atol=1e-3)


@pytest.mark.parametrize("name", ("eva02_tiny_patch14_224", "vit_small_patch14_reg4_dinov2"))
@pytest.mark.parametrize("pyramid", ("simple", "adapter"))
@torch.no_grad()
def test_masks_reach_other_vits(name: str, pyramid: str) -> None:
    """The trunk's tokens inside do not depend on what is in the padding."""
    backbone = Kind(name, {**VIT, "patch_size": 16}).build(pyramid)
    seen: list[Tensor] = []
    backbone.trunk.blocks[-1].register_forward_hook(lambda module, args, out: seen.append(out))  # type: ignore[index]
    if isinstance(backbone.pyramid, nn.Module) and hasattr(backbone.pyramid, "injectors"):
        for injector in backbone.pyramid.injectors:  # type: ignore[union-attr]
            injector.gamma.zero_()  # type: ignore[union-attr,operator]
    x = images(64, 96, 1)
    for filling in (0.0, 9.0):
        x[..., 64:] = filling
        backbone(x, torch.tensor([[64, 64]]))
    tokens = [out[:, -24:].reshape(4, 6, -1)[:, :4] for out in seen]
    torch.testing.assert_close(*tokens)


def test_masks_are_not_promised_where_they_are_not_kept() -> None:
    assert not PYRAMIDS[0].build().masks_padding
    backbone = DEIT.build()
    linvit.convert(backbone, "linformer", size=64)
    assert backbone.masks_padding == create_attention("softmax").capabilities.key_mask


def test_checkpointing_changes_nothing() -> None:
    backbone = DEIT.build().train()
    grads = []
    for enable in (False, True):
        backbone.set_grad_checkpointing(enable)
        backbone.zero_grad()
        backbone(images(64, 64))[0].square().sum().backward()
        grads.append(next(backbone.trunk.parameters()).grad)
    torch.testing.assert_close(*grads)
    with pytest.raises(LinvitError, match="cannot recompute"):
        PYRAMIDS[4].build().set_grad_checkpointing()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deit_tiny_patch16_224", {"pyramid": "own"}, "stride 16 only: give pyramid='simple' or pyramid='adapter'"),
        ("pvt_v2_b0", {"pyramid": "simple"}, "pyramid of its own: leave out pyramid='simple'"),
        ("pvt_v2_b0", {"pyramid_args": {"width": 3}}, "takes no arguments"),
        ("pvt_v2_b0", {"pyramid": "fpn"}, "unknown pyramid 'fpn'"),
        ("levit_128s", {}, "its maps are at strides 16, 32, 56, and 4, 8, 16, 32 are needed"),
        ("convit_tiny", {}, "timm has no way to its maps"),
        ("beit_base_patch16_224", {"pyramid": "adapter", **VIT}, "neither: use pyramid='simple'"),
        ("deit_tiny_patch16_224", {"pyramid": "adapter", "depth": 3}, "4 blocks at least, and .* has 3"),
        ("deit_tiny_patch16_223", {}, "unknown backbone"),
        ("deit_tiny_patch16_224", {"nonsense": 1}, "cannot be built with"),
    ],
)
def test_mistakes_are_told(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LinvitError, match=message):
        make_backbone(name, **options)


def test_too_large_an_image_is_told() -> None:
    backbone = Kind("beit_base_patch16_224", VIT).build()
    with pytest.raises(LinvitError, match="up to 64×64 pixels, got 65×30: build it with a larger img_size"):
        backbone(images(65, 30))
