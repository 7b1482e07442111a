"""The streaming loader: what a picture looks like depends on its place alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from timm.data.dataset import IterableImageDataset

from linvit.errors import LinvitError
from linvit.tasks.classify.data import Images, Stream, open_images
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.randaugment import OPERATIONS, Draw, RandAugment
from linvit.tasks.classify.streaming import Streamed, one_ahead
from tests.tasks.classify.pictures import photographs, stack
from tests.tasks.classify.test_data import break_image, make_folder
from tests.tasks.classify.test_resident import equal

SIZE = Preprocessing((24, 24))
FULL = Augmentation(randaugment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0)


def some(count: int = 20) -> Images:
    labelled = [(photographs()[i % 8], i % 5) for i in range(count)]
    return Images("photographs", labelled, labels=[label for _, label in labelled])


def test_batches_depend_on_neither_workers_nor_the_past() -> None:
    source = Streamed(some(), SIZE, 4, 5, augmentation=FULL, seed=1)
    assert (source.batches, source.images) == (5, 20)
    first = list(source.epoch(3))
    assert first[0][0].shape == (4, 3, 24, 24) and first[0][1].shape == (4, 5)
    list(source.epoch(0))
    assert equal(first, list(source.epoch(3)))
    assert equal(first[2:], list(source.epoch(3, skip=2)))
    assert not equal(first, list(source.epoch(4)))
    working = Streamed(some(), SIZE, 4, 5, augmentation=FULL, seed=1, workers=2)
    assert equal(first, list(working.epoch(3)))
    assert equal(first[3:], list(working.epoch(3, skip=3)))


def test_randaugment_at_full_strength_posterises_to_black() -> None:
    """timm's own leaves no bit at full strength, which newer versions of Pillow refuse."""
    full = Augmentation(randaugment="rand-m10-n8-p1.0-inc1")
    for images, _ in Streamed(some(), SIZE, 4, 5, augmentation=full).epoch(0):
        assert images.isfinite().all()
    draw = Draw(torch.full((8,), float(OPERATIONS.index("posterise"))), torch.ones(8), torch.ones(8))
    black = RandAugment(increasing=True).colour(stack(photographs()), draw)
    assert torch.equal(black, torch.zeros_like(black))


def test_the_training_keeps_its_random_numbers() -> None:
    source = Streamed(some(), SIZE, 4, 5, augmentation=FULL)
    torch.manual_seed(5)
    random.seed(5)
    wanted = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    list(source.epoch(0))
    assert torch.equal(torch.rand(3), wanted[0]) and random.random() == wanted[1]


def test_two_processes_share_what_one_would_see() -> None:
    one = list(Streamed(some(), SIZE, 8, 5, augmentation=FULL).epoch(1))
    parts = [list(Streamed(some(), SIZE, 4, 5, augmentation=FULL, rank=r, world=2).epoch(1)) for r in (0, 1)]
    for (images, targets), (a, b), (c, d) in zip(one, *parts, strict=True):
        torch.testing.assert_close(images, torch.cat([a, c]))
        torch.testing.assert_close(targets, torch.cat([b, d]))


def test_evaluation_takes_every_picture_in_order() -> None:
    images = torch.cat([x for x, _ in Streamed(some(11), Preprocessing((32, 32)), 4, 5).epoch(0)])
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (SIZE.mean, SIZE.std))
    wanted = (stack(photographs()) / 255 - mean) / std
    torch.testing.assert_close(images, torch.cat([wanted, wanted[:3]]))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_one_line_that_names_it(tmp_path: Path, workers: int) -> None:
    train = open_images(break_image(make_folder(tmp_path / "set")), "train")
    with pytest.raises(LinvitError, match=r"cannot read image .*/train/dog2/1.png") as caught:
        list(Streamed(train, SIZE, 3, 3, augmentation=Augmentation(), workers=workers).epoch(0))
    assert "\n" not in str(caught.value)


def test_labels_past_the_outputs_are_refused() -> None:
    with pytest.raises(LinvitError, match="photographs has label 4, the model 4 outputs"):
        list(Streamed(some(), SIZE, 20, 4).epoch(0))


class Reader:
    """What timm's WebDataset reader looks like from outside."""

    epoch = -1

    def __iter__(self):
        for i in range(10):
            yield photographs()[(i + self.epoch) % 8], i % 5

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_streams_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("wds/some", "train", None, {})
    monkeypatch.setattr(Stream, "open", lambda self, **_: IterableImageDataset(None, reader=Reader()))
    source = Streamed(stream, SIZE, 4, 5, augmentation=FULL, seed=2)
    first = list(source.epoch(1))
    assert source.batches == len(first) == 2
    assert equal(first, list(source.epoch(1))) and equal(first[1:], list(source.epoch(1, skip=1)))
    assert not equal(first, list(source.epoch(2)))
    assert sum(len(labels) for _, labels in Streamed(stream, SIZE, 4, 5).epoch(0)) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_another_epoch_changes_nothing(workers: int) -> None:
    """Least squares and BatchNorm look at a first epoch while another is being read."""
    wanted = list(Streamed(some(), SIZE, 4, 5, augmentation=FULL).epoch(1))
    source = Streamed(some(), SIZE, 4, 5, augmentation=FULL, workers=workers)
    reading = source.epoch(1)
    found = [next(reading)]
    look = source.epoch(0)
    first = next(look)
    look.close()
    found += reading
    assert equal(found, wanted) and equal([first], [next(source.epoch(0))])


def test_any_interpolation() -> None:
    own, drawn = (Augmentation(train_interpolation=how).filters(SIZE) for how in ("model", "random"))
    assert own == ("bilinear",) and drawn == ("bilinear", "bicubic")
    crop = {"crop_scale": (1.0, 1.0), "flip": 0.0}
    found = {
        how: next(Streamed(some(), SIZE, 20, 5, augmentation=Augmentation(train_interpolation=how, **crop)).epoch(0))[0]
        for how in ("bilinear", "bicubic", "random")
    }
    assert torch.equal(found["random"][::2], found["bilinear"][::2])
    assert torch.equal(found["random"][1::2], found["bicubic"][1::2])
    assert not torch.equal(found["bilinear"], found["bicubic"])


def test_steps_made_ahead_come_in_order_and_end_with_their_error() -> None:
    made: list[int] = []

    def steps():
        for number in range(5):
            made.append(number)
            yield torch.tensor(number), torch.tensor(0), None
        raise LinvitError("broken")

    ahead = one_ahead(steps(), None)
    assert next(ahead)[0] == 0
    ahead.close()
    assert made == [0, 1]
    found = []
    with pytest.raises(LinvitError, match="broken"):
        for step in one_ahead(steps(), None):
            found.append(int(step[0]))
    assert found == [0, 1, 2, 3, 4]
    assert [int(step[0]) for step in one_ahead(iter([(torch.tensor(7), torch.tensor(0), None)]), None)] == [7]
