"""Crops, flips and affine maps against torchvision, timm and Pillow."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from torch.nn import functional as F
from torchvision.transforms import RandomResizedCrop

from linvit.tasks.classify.augmenting import resample
from linvit.tasks.classify.preprocessing import CROP_COLUMNS, Augmentation
from linvit.tasks.classify.randaugment import OPERATIONS, Draw, RandAugment
from tests.tasks.classify.pictures import photographs, stack

SIZE = (32, 32)


def whole(batch: int, size: int = 32) -> torch.Tensor:
    return torch.tensor([0.0, 0.0, size, size]).expand(batch, 4)


def test_nothing_to_do_changes_nothing() -> None:
    images = stack(photographs())
    out = resample(images, whole(8), torch.zeros(8, dtype=torch.bool), SIZE)
    torch.testing.assert_close(out, images, rtol=0, atol=1e-3)


def test_flip_is_torchs_flip_where_chosen() -> None:
    images = stack(photographs())
    chosen = torch.arange(8) % 3 == 0
    out = resample(images, whole(8), chosen, SIZE)
    torch.testing.assert_close(out[chosen], images[chosen].flip(-1), rtol=0, atol=1e-3)
    torch.testing.assert_close(out[~chosen], images[~chosen], rtol=0, atol=1e-3)


def test_a_crop_is_cut_out_and_resized() -> None:
    images = stack(photographs())
    boxes = torch.tensor([[0, 5, 32, 27], [3, 0, 9, 14], [7, 2, 20, 30]] + 5 * [[1, 2, 16, 8]]).float()
    out = resample(images, boxes, torch.zeros(8, dtype=torch.bool), (24, 40))
    for i in range(8):
        top, left, height, width = (int(value) for value in boxes[i])
        cut = images[i : i + 1, :, top : top + height, left : left + width]
        wanted = F.interpolate(cut, (24, 40), mode="bilinear", align_corners=False)
        torch.testing.assert_close(out[i : i + 1], wanted, rtol=0, atol=0.01)


def test_crops_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    scale, ratio = (0.2, 1.0), (3 / 4, 4 / 3)
    theirs = torch.tensor(
        [RandomResizedCrop.get_params(torch.empty(3, 128, 96), list(scale), list(ratio)) for _ in range(4000)]
    ).float()
    drawn = Augmentation(crop_scale=scale, crop_ratio=ratio)
    ours = drawn.draw_boxes(torch.rand(4000, CROP_COLUMNS), (128, 96), SIZE)
    assert (ours[:, 0] + ours[:, 2] <= 128).all() and (ours[:, 1] + ours[:, 3] <= 96).all()
    assert (ours[:, :2] >= 0).all() and torch.equal(ours, ours.round())
    for quantity in (lambda b: b[:, 2] * b[:, 3] / (128 * 96), lambda b: (b[:, 3] / b[:, 2]).log(), lambda b: b[:, 0]):
        a, b = quantity(ours), quantity(theirs)
        error = (a.var() / 4000 + b.var() / 4000).sqrt()
        assert abs(a.mean() - b.mean()) < 4.5 * error
        assert abs(a.std() / b.std() - 1) < 0.1


def test_scale_one_takes_the_whole_picture() -> None:
    boxes = Augmentation(crop_scale=(1.0, 1.0)).draw_boxes(torch.rand(50, CROP_COLUMNS), (32, 32), SIZE)
    assert (boxes[:, 2] * boxes[:, 3] == 32**2).all()


@pytest.mark.parametrize(
    ("ours", "theirs", "argument"),
    [
        ("rotate", auto_augment.rotate, 24.0),
        ("shear_x", auto_augment.shear_x, 0.24),
        ("shear_y", auto_augment.shear_y, 0.24),
        ("translate_x", auto_augment.translate_x_rel, 0.36),
        ("translate_y", auto_augment.translate_y_rel, 0.36),
    ],
)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_affine_operations_are_timms(ours: str, theirs, argument: float, sign: float) -> None:
    pictures = photographs(64)
    number = torch.full((8,), float(OPERATIONS.index(ours)))
    draw = Draw(number, torch.full((8,), 0.8), torch.full((8,), sign))
    affine = RandAugment().affine(draw, (64, 64))
    fill = torch.tensor([10.0, 200.0, 90.0])
    out = resample(stack(pictures), whole(8, 64), torch.zeros(8, dtype=torch.bool), (64, 64), [affine], fill)
    turned = [theirs(p, sign * argument, resample=Image.Resampling.BILINEAR, fillcolor=(10, 200, 90)) for p in pictures]
    apart = (out - stack(tuple(turned))).abs().amax(1)
    assert apart.median() < 1
    assert (apart > 6).float().mean() < 0.04  # along the rim Pillow blends with nothing


def test_affine_maps_compose_in_their_order() -> None:
    images = stack(photographs())
    off = torch.zeros(8, dtype=torch.bool)
    draws = [
        Draw(torch.full((8,), float(OPERATIONS.index(name))), torch.full((8,), 0.5), torch.ones(8))
        for name in ("translate_x", "shear_y")
    ]
    affines = [RandAugment().affine(draw, SIZE) for draw in draws]
    fill = torch.zeros(3)
    once = resample(images, whole(8), off, SIZE, affines, fill)
    first = resample(images, whole(8), off, SIZE, affines[:1], fill)
    twice = resample(first, whole(8), off, SIZE, affines[1:], fill)
    assert (once - twice).abs().median() < 3
    other = resample(images, whole(8), off, SIZE, affines[::-1], fill)
    assert (other - twice).abs().mean() > 2 * (once - twice).abs().mean()
    assert not math.isnan(float(once.sum()))
