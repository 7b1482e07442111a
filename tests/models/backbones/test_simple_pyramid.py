"""The simple pyramid against its layers by hand, and its counts against ViTDet's."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.models.backbones.simple_pyramid import SimplePyramid


def layer_norm(x: Tensor) -> Tensor:
    """Over channels, as a new norm does it."""
    mean, variance = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-6).sqrt()


@torch.no_grad()
def test_against_the_layers_by_hand() -> None:
    torch.manual_seed(0)
    pyramid = SimplePyramid(16, 16, width=8).double()
    x = torch.randn(2, 16, 4, 6, dtype=torch.double)
    first, second = (m for m in pyramid.scales[0].modules() if isinstance(m, nn.ConvTranspose2d))
    fourfold = second(F.gelu(layer_norm(first(x))))
    scaled = [fourfold, pyramid.scales[1](x), x, F.max_pool2d(x, 2)]
    assert [tuple(level.shape[1:]) for level in scaled] == [(4, 16, 24), (8, 8, 12), (16, 4, 6), (16, 2, 3)]
    weights = [(narrow[0].weight, smooth[0].weight) for narrow, smooth in zip(pyramid.inputs, pyramid.outputs)]  # type: ignore[index] # noqa: B905
    for level, found, (narrow, smooth) in zip(scaled, pyramid(x, (64, 96)), weights, strict=True):
        wanted = layer_norm(F.conv2d(layer_norm(F.conv2d(level, narrow)), smooth, padding=1))
        torch.testing.assert_close(found, wanted)


def test_counts_of_vitdet_base() -> None:
    """Deconvolutions 768 → 384 → 192 and 768 → 384, and four times 1×1 and 3×3 to 256, with their norms."""
    halved, quartered = 768 * 384 * 4 + 384, 384 * 192 * 4 + 192
    narrowed = (192 + 384 + 768 + 768) * 256
    smoothed, norms = 4 * 256 * 256 * 9, 4 * 2 * 2 * 256
    count = sum(p.numel() for p in SimplePyramid(768, 16).parameters())
    assert count == halved + 2 * 384 + quartered + halved + narrowed + smoothed + norms


@pytest.mark.parametrize(("patch", "doublings"), [(8, (1, 0, -1, -2)), (14, (2, 1, 0, -1)), (32, (3, 2, 1, 0))])
@torch.no_grad()
def test_other_patches(patch: int, doublings: tuple[int, ...]) -> None:
    pyramid = SimplePyramid(16, patch, width=8)
    assert pyramid.doublings == doublings
    size = (75, 130)
    last = torch.randn(1, 16, -(-size[0] // patch), -(-size[1] // patch))
    maps = pyramid(last, size)
    assert [tuple(level.shape[1:]) for level in maps] == [(8, -(-75 // s), -(-130 // s)) for s in (4, 8, 16, 32)]
