"""Another patch or window size: features stay close on a photograph, and positions are interpolated, not lost.

No pretrained weights are at hand, so the kernels are learned from one photograph (whitened principal components of its
16×16 patches, which like a trained ViT's first layer hold smooth and fine filters) and judged on another.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit import LinvitError
from tests.conversion.families import permitting

WIDTH = 192


@cache
def photograph(name: str) -> Tensor:
    """The middle square, normalised."""
    picture = torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1)[None, :, :, 100:527] / 255
    mean, std = (
        torch.tensor(c)[:, None, None] for c in (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    )
    return (picture - mean) / std


@cache
def learned_kernels(patch: int = 16, count: int = 4000) -> Tensor:
    """Whitened principal components of a photograph's patches, `(WIDTH, 3, patch, patch)`."""
    picture = photograph("flower.jpg")[0].numpy()
    rng = np.random.default_rng(0)
    corners = rng.integers(0, (picture.shape[1] - patch, picture.shape[2] - patch), (count, 2))
    patches = np.stack([picture[:, y : y + patch, x : x + patch].ravel() for y, x in corners])
    _, sizes, directions = np.linalg.svd(patches - patches.mean(0), full_matrices=False)
    kernels = directions[:WIDTH] / (sizes[:WIDTH, None] / count**0.5 + 0.1)
    return torch.from_numpy(kernels.reshape(WIDTH, 3, patch, patch)).float()


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", img_size=256, depth=4, num_classes=0).eval()
    model.patch_embed.proj.weight.data = learned_kernels().clone()
    return model


def cosine(a: Tensor, b: Tensor) -> float:
    return F.cosine_similarity(a, b, dim=-1).mean().item()


@torch.no_grad()
def test_patch_16_to_14_keeps_the_features_and_beats_bilinear_resizing() -> None:
    original = vit()
    large, small = (
        F.interpolate(photograph("china.jpg"), (side, side), mode="bicubic", antialias=True) for side in (256, 224)
    )
    ours = copy.deepcopy(original)
    linvit.resample_patches(ours, 14, size=224)
    naive = copy.deepcopy(ours)
    kernel = original.patch_embed.proj.weight
    naive.patch_embed.proj.weight.data = F.interpolate(kernel, (14, 14), mode="bilinear")
    tokens = {name: cosine(m.patch_embed(small), original.patch_embed(large)) for name, m in pairs(ours, naive)}
    features = {
        name: cosine(m.forward_features(small), original.forward_features(large)) for name, m in pairs(ours, naive)
    }
    print(f"patch tokens {tokens}, features {features}")
    assert tokens["ours"] > 0.96 and tokens["naive"] < 0.90
    assert features["ours"] > 0.96 and features["ours"] > features["naive"] + 0.05


def pairs(ours: nn.Module, naive: nn.Module) -> list[tuple[str, nn.Module]]:
    return [("ours", ours), ("naive", naive)]


@torch.no_grad()
def test_a_larger_kernel_is_exact() -> None:
    """Twice the patch on a picture twice the size: the tokens are the same, to rounding."""
    model, image = vit(), F.interpolate(photograph("china.jpg"), (256, 256), mode="bicubic", antialias=True)
    before = model.patch_embed(image)
    linvit.resample_patches(model, 32, size=512)
    patches = image.unfold(2, 16, 16).unfold(3, 16, 16)  # resized one by one, so that no patch sees its neighbours
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 16, 16)
    doubled = F.interpolate(patches, (32, 32), mode="bicubic", antialias=True)
    after = model.patch_embed.proj(doubled).flatten(1)[None]
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("first", ["convert", "resample"])
def test_converted_before_or_after_comes_to_the_same_and_saves(first: str, tmp_path: Path) -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=2, num_classes=7).eval()
    table = model.pos_embed.detach().clone()
    steps = [lambda: linvit.convert(model, "castling", sparse=False), lambda: linvit.resample_patches(model, 14)]
    for step in steps if first == "convert" else steps[::-1]:
        step()
    assert model.patch_embed.grid_size == (16, 16) and model.pos_embed.shape[1] == 257
    resized = F.interpolate(
        table[:, 1:].unflatten(1, (14, 14)).permute(0, 3, 1, 2), (16, 16), mode="bicubic", antialias=True
    )
    torch.testing.assert_close(model.pos_embed[:, 1:], resized.flatten(2).transpose(1, 2))
    assert torch.equal(model.pos_embed[:, :1], table[:, :1])
    image = torch.randn(1, 3, 224, 224)
    linvit.save(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(linvit.load(tmp_path)(image), model(image))


def test_as_many_tokens_on_another_grid() -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=1, img_size=(64, 144))
    table = model.pos_embed.detach().clone()
    linvit.resample_patches(model, 16, size=96)
    resized = F.interpolate(
        table[:, 1:].unflatten(1, (4, 9)).permute(0, 3, 1, 2), (6, 6), mode="bicubic", antialias=True
    )
    torch.testing.assert_close(model.pos_embed[:, 1:], resized.flatten(2).transpose(1, 2))


def swin() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4), "num_classes": 7}
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes).eval()
    for name, parameter in model.named_parameters():
        if "bias_table" in name:  # falls with distance, as trained ones do
            y, x = torch.meshgrid(torch.arange(-6.0, 7), torch.arange(-6.0, 7), indexing="ij")
            near = -(y.square() + x.square()).sqrt().flatten()
            parameter.data = near[:, None] * torch.linspace(0.5, 1, parameter.shape[1])
    return model


@pytest.mark.parametrize("plan", [None, "softmax", "relu_quadratic"])
def test_window_7_to_14_interpolates_the_relative_bias(plan: str | None, tmp_path: Path) -> None:
    model = swin()
    if plan:
        linvit.convert(model, plan)
    attention = model.layers[0].blocks[1].attn
    before = attention.relative_position_bias_table.detach().reshape(13, 13, -1)
    linvit.resample_windows(model, 14)
    after = attention.relative_position_bias_table.detach().reshape(27, 27, -1)
    assert attention.window_size == (14, 14)
    torch.testing.assert_close(after[13, 13], before[6, 6], rtol=0, atol=1e-4)  # the token itself
    torch.testing.assert_close(after[::26, ::26], before[::12, ::12], rtol=0, atol=1e-4)  # the farthest
    torch.testing.assert_close(after, after.flip(0, 1), rtol=0, atol=1e-4)
    assert (after[13, 13:].diff(dim=0) < 0).all()  # still falls with distance
    linvit.save(model, tmp_path)
    with torch.no_grad():
        image = torch.randn(1, 3, 224, 224)
        assert torch.equal(linvit.load(tmp_path)(image), model(image))


def test_window_change_where_the_bias_was_dropped() -> None:
    model = swin()
    linvit.convert(model, permitting("stella"))
    linvit.resample_windows(model, 14)
    assert model(torch.randn(1, 3, 224, 224)).isfinite().all()
    assert not any("bias_table" in name for name in model.state_dict())


def test_patch_change_of_swin_keeps_its_windows() -> None:
    model = swin()
    linvit.resample_patches(model, 8, size=448)
    assert model.layers[0].blocks[0].attn.window_size == (7, 7)
    assert model(torch.randn(1, 3, 448, 448)).isfinite().all()


def test_mistakes_are_one_line() -> None:
    vit = timm.create_model("deit_tiny_patch16_224", depth=1)
    swinv2 = timm.create_model("swinv2_tiny_window8_256", embed_dim=24, depths=(2,), num_heads=(1,))
    for message, attempt in {
        "no patch embedding": lambda: linvit.resample_patches(nn.Linear(2, 2), 14),
        "224×224 pixels cannot be cut into patches of 15": lambda: linvit.resample_patches(vit, 15),
        "at least 1, got 0": lambda: linvit.resample_patches(vit, 0),
        "no windows": lambda: linvit.resample_windows(vit, 14),
        "window size must be at least 1": lambda: linvit.resample_windows(swin(), 0),
        "256×256 pixels cannot be cut into windows of 5 tokens": lambda: linvit.resample_windows(swinv2, 5),
    }.items():
        with pytest.raises(LinvitError, match=message):
            attempt()
    assert swinv2.layers[0].blocks[0].window_size == (8, 8)
    assert swinv2.eval()(torch.randn(1, 3, 256, 256)).shape == (1, 1000), "it is as it was"
    assert vit.patch_embed.patch_size == (16, 16)
