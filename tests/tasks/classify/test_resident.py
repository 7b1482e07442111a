"""The resident loader: repeatable, resumable, the same over any number of processes, and nothing in it waits."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from linvit.errors import LinvitError
from linvit.tasks.classify.augmenting import Augmenter, Order
from linvit.tasks.classify.data import Images, open_images
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Held, Pixels, Resident, check_room, decode
from tests.tasks.classify.pictures import archive, photographs, stack

SIZE = Preprocessing((32, 32))
FULL = Augmentation(randaugment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0)


def pixels(count: int = 50) -> Pixels:
    pictures = stack(photographs()).to(torch.uint8).repeat(count // 8 + 1, 1, 1, 1)[:count]
    return Pixels("photographs", pictures, torch.arange(count) % 5)


def batches(source: Resident, epoch: int, skip: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(source.epoch(epoch, skip))


def equal(a: list[tuple[torch.Tensor, ...]], b: list[tuple[torch.Tensor, ...]]) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(torch.equal(x, y) for one, other in pairs for x, y in zip(one, other, strict=True))


def test_an_epoch_repeats_itself_and_can_be_entered_anywhere() -> None:
    source = Resident(pixels(), SIZE, 8, 5, augmentation=FULL, seed=3)
    assert (source.batches, source.images) == (6, 48)
    first = batches(source, 2)
    assert first[0][0].shape == (8, 3, 32, 32) and first[0][1].shape == (8, 5)
    torch.testing.assert_close(first[0][1].sum(1), torch.ones(8))
    torch.manual_seed(99)
    again = Resident(pixels(), SIZE, 8, 5, augmentation=FULL, seed=3)
    assert equal(first, batches(again, 2))
    assert equal(first[4:], batches(again, 2, skip=4))
    assert not equal(first, batches(source, 3))
    assert not equal(first, batches(Resident(pixels(), SIZE, 8, 5, augmentation=FULL, seed=4), 2))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_what_one_would_see(world: int) -> None:
    one = batches(Resident(pixels(), SIZE, 16, 5, augmentation=FULL), 1)
    ranks = [Resident(pixels(), SIZE, 16 // world, 5, augmentation=FULL, rank=r, world=world) for r in range(world)]
    parts = [batches(source, 1) for source in ranks]
    assert {source.images for source in ranks} == {48}
    joined = [tuple(torch.cat(tensors) for tensors in zip(*step, strict=True)) for step in zip(*parts, strict=True)]
    for (a, b), (c, d) in zip(one, joined, strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=1e-5)
        torch.testing.assert_close(b, d)


def test_every_image_comes_once() -> None:
    for world in (1, 3):
        for training in (True, False):
            orders = [Order(37, 4, 7, rank, world, training) for rank in range(world)]
            seen = torch.cat([torch.cat(order.epoch(5)) for order in orders])
            assert len(seen.unique()) == len(seen) == orders[0].images
            assert len(seen) == (37 if not training else 36)
            assert [len(order.epoch(5)) for order in orders] == [order.batches for order in orders]


def test_it_compiles_as_one_graph_with_the_same_result() -> None:
    """One graph means that no value is fetched from the device and no shape depends on one."""
    source = Resident(pixels(), SIZE, 8, 5, augmentation=FULL)
    wanted = batches(source, 0)[0]
    source.augment = torch.compile(source.augmenter, fullgraph=True, dynamic=False, backend="eager")
    found = next(iter(source.epoch(0)))
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], wanted[1])


def test_without_variation_pictures_come_as_they_are() -> None:
    plain = Augmentation(crop_scale=(1.0, 1.0), flip=0.0)
    images, labels = batches(Resident(pixels(8), SIZE, 8, 5, augmentation=plain), 0)[0]
    order = Order(8, 8).epoch(0)[0]
    back = images * torch.tensor(SIZE.std).view(1, 3, 1, 1) + torch.tensor(SIZE.mean).view(1, 3, 1, 1)
    torch.testing.assert_close(255 * back, stack(photographs())[order], rtol=0, atol=1e-3)
    assert torch.equal(labels, (torch.arange(8) % 5)[order])


def test_jitter_only_without_randaugment_as_in_timm() -> None:
    with_both = replace(FULL, colour_jitter=0.4)
    assert equal(
        batches(Resident(pixels(), SIZE, 8, 5, augmentation=FULL), 0),
        batches(Resident(pixels(), SIZE, 8, 5, augmentation=with_both), 0),
    )
    plain = replace(FULL, randaugment=None)
    assert not equal(
        batches(Resident(pixels(), SIZE, 8, 5, augmentation=plain), 0),
        batches(Resident(pixels(), SIZE, 8, 5, augmentation=replace(plain, colour_jitter=0.4)), 0),
    )


def test_evaluation_sees_what_timms_transform_gives() -> None:
    source = list(photographs(40)) + [p.resize((61, 40)) for p in photographs(40)]
    images = Images("photographs", list(zip(source, range(16), strict=True)), labels=range(16))
    chosen = Preprocessing((32, 32), crop=0.875, interpolation="bicubic")
    found = torch.cat([x for x, _ in Resident(decode(images, chosen, training=False), chosen, 5, 16).epoch(0)])
    transform = timm.data.create_transform(
        32, crop_pct=0.875, interpolation="bicubic", mean=chosen.mean, std=chosen.std
    )
    torch.testing.assert_close(found, torch.stack([transform(p) for p in source]), rtol=0, atol=1e-5)


def test_training_keeps_the_whole_picture_and_its_shape() -> None:
    """Without a crop the middle square is seen, as it was; with one, every part of the picture may be."""
    wide = Image.fromarray(np.tile(np.arange(60, dtype=np.uint8), (20, 1)))
    images = Images("one", [(wide, 0)], labels=[0])
    grey = Preprocessing((20, 20), (0.5,), (0.5,))
    kept = decode(images, grey)
    assert kept.pictures.shape == (1, 1, 20, 20) and kept.frames is not None and kept.frames.tolist() == [[20, 60]]
    whole = Augmentation(crop_scale=(1.0, 1.0), flip=0.0)
    middle, _ = next(Resident(kept, grey, 1, 1, augmentation=whole).epoch(0))
    torch.testing.assert_close(127.5 * middle[0, 0, 0] + 127.5, torch.arange(20, 40).float(), rtol=0, atol=1.01)
    some = Augmentation(crop_scale=(0.2, 0.3), flip=0.0)
    found = [next(Resident(kept, grey, 1, 1, augmentation=some, seed=seed).epoch(0))[0] for seed in range(40)]
    assert min(one.min() for one in found) < -0.95 and max(one.max() for one in found) > 59 / 127.5 - 1.05
    square = Images("one", [(wide.resize((40, 40)), 0)], labels=[0])
    assert decode(square, grey).frames is None


def test_a_held_set_is_found_again() -> None:
    train = open_images("digits")
    small = Preprocessing((8, 8), (0.5,), (0.5,))
    seen = []

    @contextmanager
    def progress(what: str, total: int):
        seen.append((what, total))
        yield lambda: None

    held: Held = {}
    first = decode(train, small, held=held, progress=progress)
    assert decode(train, small, held=held, progress=progress) is first and seen == [("decoding digits", 1437)]
    decode(train, replace(small, size=(16, 16)), held=held, progress=progress)
    assert len(seen) == len(held) == 2


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    for message, attempt in {
        "takes 5.0 GiB decoded, too much for 1.0 GiB": lambda: check_room("set", 5 * 2**30, torch.device("cuda")),
        "the set has 50 images, less than one batch of 64": lambda: Resident(
            pixels(), SIZE, 32, 5, augmentation=FULL, world=2
        ),
        "7 images a process is odd": lambda: Resident(pixels(), SIZE, 7, 5, augmentation=FULL),
        "has label 4, the model 4 outputs": lambda: Resident(pixels(), SIZE, 8, 4),
        "can only be read in order": lambda: decode(open_images("wds/x", root=tmp_path), SIZE),
    }.items():
        with pytest.raises(LinvitError, match=message):
            attempt()


def test_a_real_set_is_decoded_and_varied() -> None:
    train = open_images(archive(), "train")
    train.source.samples, train.source.places = train.source.samples[::100], train.source.places[::100]
    found = decode(train, Preprocessing((128, 128)))
    assert found.pictures.shape == (60, 3, 128, 128) and found.labels.unique().tolist() == list(range(10))
    images, targets = next(iter(Resident(found, Preprocessing((128, 128)), 20, 10, augmentation=FULL).epoch(0)))
    assert images.isfinite().all() and abs(images.mean()) < 1 and 0.5 < images.std() < 2
    assert targets.shape == (20, 10)


def test_augmenter_counts_its_columns() -> None:
    bare = Augmenter(Augmentation(), SIZE, 5, torch.device("cpu"))
    assert sum(Augmenter(FULL, SIZE, 5, torch.device("cpu")).columns) == sum(bare.columns) + 8


def test_batches_without_mixing() -> None:
    """BatchNorm is measured on them: everything else is as it is with mixing."""
    images, targets = next(Resident(pixels(), SIZE, 8, 5, augmentation=FULL).epoch(0, mixed=False))
    plain = replace(FULL, mixup=0, cutmix=0)
    wanted, labels = next(Resident(pixels(), SIZE, 8, 5, augmentation=plain).epoch(0))
    torch.testing.assert_close(images, wanted)
    assert torch.equal(targets.argmax(-1), labels) and targets.max(-1).values.min() == 1


@pytest.mark.parametrize("world", [1, 2])
def test_images_that_come_several_times_in_a_step(world: int) -> None:
    orders = [Order(60, 6, 3, rank, world, repeats=3) for rank in range(world)]
    steps = [torch.cat(parts) for parts in zip(*(order.epoch(1) for order in orders), strict=True)]
    assert len(steps) == 60 // (6 * world)
    assert all(len(step.unique()) == 2 * world for step in steps)  # and each three times
    assert len(torch.cat(steps).unique()) == 20
    neighbours = torch.stack(steps).view(-1, 2)
    assert (neighbours[:, 0] != neighbours[:, 1]).all()  # mixing an image with itself would be no mixing
    odd = Order(60, 8, 3, repeats=3).epoch(0)[0]
    assert len(odd) == 8 and len(odd.unique()) == 3


def test_models_that_squash_are_evaluated_so() -> None:
    """timm's `crop_mode` says how a picture comes to its size."""
    model = timm.create_model("maxvit_tiny_tf_384.in1k", num_classes=3)
    picture = photographs(40)[0].resize((96, 60))
    chosen = Preprocessing.of(model)
    assert chosen.crop_mode == "squash"
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = Images("one", [(picture, 0)], labels=[0])
    found, _ = next(Resident(decode(images, chosen, training=False), chosen, 1, 3).epoch(0))
    torch.testing.assert_close(found[0], transform(picture), rtol=0, atol=1e-5)
