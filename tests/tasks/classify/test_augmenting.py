"""Mixup, cutmix and erasing against timm's own classes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing

from linvit.tasks.classify.augmenting import ERASE_COLUMNS, draw_erased, erase, mix, mixing_table
from linvit.tasks.classify.preprocessing import Augmentation


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.87, 1.0])
def test_a_pair_is_mixed_as_timm_mixes_it(share: float, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two pictures timm's partner, the last, is ours, the neighbour."""
    torch.manual_seed(0)
    images, labels = torch.randn(2, 3, 20, 28), torch.tensor([3, 1])
    theirs = Mixup(0.8, 1.0, label_smoothing=0.0, num_classes=5)
    monkeypatch.setattr(theirs, "_params_per_batch", lambda: (share, cut))
    for down, across in ((0.0, 0.5), (0.4, 0.93), (0.99, 0.1)):
        places = iter((int(down * 20), int(across * 28)))
        monkeypatch.setattr(np.random, "randint", lambda *args, places=places, **kwargs: next(places))
        wanted = theirs(images.clone(), labels)
        ours = mix(images, labels, torch.tensor([share, float(cut), down, across]), 5)
        torch.testing.assert_close(ours[0], wanted[0])
        torch.testing.assert_close(ours[1], wanted[1])


def test_neighbours_are_mixed() -> None:
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 4, 4)
    mixed, targets = mix(images, torch.arange(6), torch.tensor([0.75, 0.0, 0.5, 0.5]), 6)
    assert mixed[:, 0, 0, 0].tolist() == [0.25, 0.75, 2.25, 2.75, 4.25, 4.75]
    assert targets[4].tolist() == [0, 0, 0, 0, 0.75, 0.25]


def test_the_table_has_the_recipes_frequencies() -> None:
    table = mixing_table(Augmentation(mixup=0.8, cutmix=1.0, mixup_prob=0.7, mixup_switch=0.4), 20_000, 3, 5)
    mixed = table[:, 0] < 1
    assert abs(mixed.float().mean() - 0.7) < 0.015
    assert abs(table[mixed, 1].mean() - 0.4) < 0.015
    by_mixup = table[mixed & (table[:, 1] == 0), 0]
    assert abs(by_mixup.mean() - 0.5) < 0.02 and abs(by_mixup.var() - 0.25 / 2.6) < 0.01  # beta(0.8, 0.8)
    assert torch.equal(
        table, mixing_table(Augmentation(mixup=0.8, cutmix=1.0, mixup_prob=0.7, mixup_switch=0.4), 20_000, 3, 5)
    )
    assert (mixing_table(Augmentation(mixup=0.2), 100, 0, 0)[:, 1] == 0).all()
    assert (mixing_table(Augmentation(cutmix=1.0), 100, 0, 0)[:, 1] == 1).all()


def test_erased_areas_are_distributed_as_timms() -> None:
    torch.manual_seed(0)
    random.seed(0)
    theirs = RandomErasing(0.25, mode="const", device="cpu")
    erased = [(theirs(torch.ones(1, 40, 40)) == 0).float().mean().item() for _ in range(6000)]
    ours = draw_erased(torch.rand(6000, ERASE_COLUMNS), (40, 40), 0.25).float().mean((1, 2))
    wanted = torch.tensor(erased)
    assert abs((ours > 0).float().mean() - 0.25) < 0.02
    assert abs(ours[ours > 0].mean() - wanted[wanted > 0].mean()) < 0.008
    assert abs(ours[ours > 0].std() - wanted[wanted > 0].std()) < 0.008
    assert ours.max() < 0.36


def test_erasing_puts_noise_into_one_rectangle() -> None:
    mask = draw_erased(torch.rand(64, ERASE_COLUMNS), (24, 32), 1.0)
    assert mask.flatten(1).any(1).all()
    for picture in mask:
        rows, columns = picture.any(1), picture.any(0)
        assert picture.sum() == rows.sum() * columns.sum()
    images, noise = torch.zeros(64, 3, 24, 32), torch.randn(8, 3, 24, 32)
    out = erase(images, mask, noise)
    assert (out[~mask[:, None].expand_as(out)] == 0).all()
    torch.testing.assert_close(out[11][:, mask[11]], noise[3][:, mask[11]])
