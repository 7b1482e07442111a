"""Every colour operation against Pillow, and RandAugment against timm's operations and frequencies."""

from __future__ import annotations

import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from timm.data import auto_augment
from torch import Tensor

from linvit.errors import LinvitError
from linvit.tasks.classify import randaugment
from linvit.tasks.classify.randaugment import OPERATIONS, Draw, RandAugment, equalise_some
from tests.tasks.classify.pictures import photographs, stack

FLAT = Image.new("RGB", (32, 32), (90, 90, 91))
TIMM = {
    "autocontrast": "AutoContrast",
    "equalise": "Equalize",
    "invert": "Invert",
    "posterise": "Posterize",
    "solarise": "Solarize",
    "solarise_add": "SolarizeAdd",
    "colour": "Color",
    "contrast": "Contrast",
    "brightness": "Brightness",
    "sharpness": "Sharpness",
}
GROWING = ("posterise", "solarise", "colour", "contrast", "brightness", "sharpness")


def like_pillow(ours: Tensor, pictures: list[Image.Image], tolerance: float = 1.0) -> None:
    assert (ours - stack(tuple(pictures))).abs().max() <= tolerance


def test_operations_without_strength_are_pillows() -> None:
    pictures = (*photographs(), FLAT)
    like_pillow(randaugment.equalise(stack(pictures)), [ImageOps.equalize(p) for p in pictures], 0)
    like_pillow(randaugment.autocontrast(stack(pictures)), [ImageOps.autocontrast(p) for p in pictures])


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.9])
def test_enhancements_are_pillows(factor: float) -> None:
    pictures, images = photographs(), stack(photographs())
    factors = torch.full((8,), factor)
    for other, theirs in (
        (torch.zeros_like(images), ImageEnhance.Brightness),
        (randaugment.mean_grey(images), ImageEnhance.Contrast),
        (randaugment.grey(images), ImageEnhance.Color),
        (randaugment.smooth(images), ImageEnhance.Sharpness),
    ):
        like_pillow(randaugment.blend(images, other, factors), [theirs(p).enhance(factor) for p in pictures], 2)


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("name", TIMM)
def test_randaugment_has_timms_strengths(name: str, increasing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: value)
    theirs = TIMM[name] + ("Increasing" if increasing and name in GROWING else "")
    pictures = photographs()
    for level in (0.3, 0.9):
        operation = auto_augment.AugmentOp(theirs, prob=1.0, magnitude=10 * level)
        draw = Draw(torch.full((8,), float(OPERATIONS.index(name))), torch.full((8,), level), torch.ones(8))
        ours = RandAugment(increasing=increasing).colour(stack(pictures), draw)
        like_pillow(ours, [operation(p) for p in pictures], 1 if name != "sharpness" else 2)


def test_each_picture_has_its_own_operation() -> None:
    images = stack(photographs())
    names = ("invert", "solarise", "autocontrast", "equalise", "colour", "rotate", "sharpness")
    numbers = torch.tensor([*(float(OPERATIONS.index(name)) for name in names), -1])
    policy = RandAugment(increasing=True)
    together = policy.colour(images, Draw(numbers, torch.full((8,), 0.9), torch.ones(8)))
    for i in range(8):
        draw = Draw(numbers[i : i + 1], torch.full((1,), 0.9), torch.ones(1))
        torch.testing.assert_close(together[i : i + 1], policy.colour(images[i : i + 1], draw))
    torch.testing.assert_close(together[5], images[5])  # geometry is not colour
    torch.testing.assert_close(together[7], images[7])


def test_draws_have_timms_frequencies_and_magnitudes() -> None:
    torch.manual_seed(0)
    policy = RandAugment.parse("rand-m9-mstd0.5-inc1")
    assert policy == RandAugment(9, 2, 0.5, 0.5, 10, True)
    draws = policy.draw(torch.rand(30_000, policy.columns))
    assert len(draws) == 2
    for draw in draws:
        counts = torch.bincount((draw.operation + 1).long(), minlength=16) / 30_000
        assert abs(counts[0] - 0.5) < 0.015
        assert ((counts[1:] - 0.5 / 15).abs() < 0.006).all()
        assert abs(draw.level.mean() - 0.898) < 0.005 and abs(draw.level.std() - 0.046) < 0.005
        assert draw.level.max() <= 1 and abs(draw.sign.mean()) < 0.03
    uniform = RandAugment.parse("rand-m8-mstd101-n1-p1.0").draw(torch.rand(30_000, 4))[0].level
    assert abs(uniform.mean() - 0.4) < 0.01 and uniform.max() > 0.79


def test_equalising_a_part_leaves_the_rest() -> None:
    images = stack(photographs(count=4)).repeat(12, 1, 1, 1)
    chosen = torch.arange(48) % 7 == 2
    out = equalise_some(images, chosen)
    torch.testing.assert_close(out[chosen], randaugment.equalise(images[chosen]))
    torch.testing.assert_close(out[~chosen], images[~chosen])


def test_jitter_stays_near_and_grey_stays_grey() -> None:
    images = stack(photographs())
    torch.testing.assert_close(randaugment.jitter(images, torch.full((8, 3), 0.5), 0.4), images, rtol=0, atol=1e-3)
    dark = randaugment.jitter(images, torch.tensor([[0.0, 0.5, 0.5]]).expand(8, 3), 0.4)
    like_pillow(dark, [ImageEnhance.Brightness(p).enhance(0.6) for p in photographs()])
    single = images[:, :1]
    assert randaugment.jitter(single, torch.rand(8, 3), 0.4).shape == single.shape


@pytest.mark.parametrize("text", ["rand-m9-x3", "augmix-m5", "rand-w0", "rand-m"])
def test_unknown_notation_is_refused(text: str) -> None:
    with pytest.raises(LinvitError, match="RandAugment"):
        RandAugment.parse(text)
