"""What a batch holds depends on the seed, the epoch and the images alone."""

import json
import random
from pathlib import Path

import pytest
import torch

from linvit.errors import LinvitError
from linvit.tasks.dense.loading import Batch, DenseSource, Reader, Request, statistics_of, unpack
from linvit.tasks.dense.readers import open_dense
from linvit.tasks.dense.samples import Samples
from linvit.tasks.dense.transforms import TransformSettings
from tests.dense_fixture import photographs, write_ade, write_coco

FULL = TransformSettings(64, "shortest", scale_jitter=(0.5, 2.0), photometric=True)
PLAIN = TransformSettings(96, "longest", flip=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("sets") / "coco")


@pytest.fixture(scope="module")
def objects(folder: Path) -> Samples:
    return open_dense(folder, "detect", masks=True)[0]


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return open_dense(write_ade(tmp_path_factory.mktemp("sets") / "ade"), "segment")[0]


def equal(one: list[Batch], other: list[Batch]) -> bool:
    def same(a: Batch, b: Batch) -> bool:
        pairs = zip(a[1], b[1], strict=True)
        return torch.equal(a[0], b[0]) and all(
            x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in pairs
        )

    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["objects", "pixels"])
def test_batches_depend_on_neither_workers_nor_the_past(kind: str, request: pytest.FixtureRequest) -> None:
    samples = request.getfixturevalue(kind)
    source = DenseSource(samples, FULL, 2, training=True, seed=1)
    assert (source.batches, source.images) == (3, 6)
    first = list(source.epoch(3))
    assert len(first) == 3 and first[0][0].shape == (2, 3, 64, 64)
    list(source.epoch(0))
    assert equal(first, list(source.epoch(3))) and not equal(first, list(source.epoch(4)))
    assert equal(first[2:], list(source.epoch(3, skip=2)))
    working = DenseSource(samples, FULL, 2, training=True, seed=1, workers=2)
    try:
        assert equal(first, list(working.epoch(3)))
        assert equal(first[1:], list(working.epoch(3, skip=1)))
        reading = working.epoch(3)
        found = [next(reading)]
        look = working.epoch(0)  # a look at another epoch changes nothing
        next(look)
        look.close()
        assert equal(first, found + list(reading))
        next(working.epoch(2))  # one that is given up in its middle
        assert equal(first, list(working.epoch(3)))
    finally:
        working.close()
    assert working.kept is None


def test_the_training_keeps_its_random_numbers(objects: Samples) -> None:
    torch.manual_seed(5)
    random.seed(5)
    wanted = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    list(DenseSource(objects, FULL, 2, training=True).epoch(0))
    assert torch.equal(torch.rand(3), wanted[0]) and random.random() == wanted[1]


def test_two_processes_share_what_one_would_see(objects: Samples) -> None:
    one = list(DenseSource(objects, FULL, 2, training=True).epoch(1))
    parts = [list(DenseSource(objects, FULL, 1, training=True, rank=rank, world=2).epoch(1)) for rank in (0, 1)]
    for (images, targets), first, second in zip(one, *parts, strict=True):
        assert torch.equal(images, torch.cat([first[0], second[0]]))
        assert equal([(images, targets)], [(images, first[1] + second[1])])
    judged = [DenseSource(objects, PLAIN, 2, training=False, rank=rank, world=2).epoch(0) for rank in (0, 1)]
    numbers = [[int(target["image_id"]) for _, targets in part for target in targets] for part in judged]
    assert numbers == [[1, 3, 5], [2, 4, 6]]


def test_training_targets_are_on_the_batchs_canvas(objects: Samples, pixels: Samples) -> None:
    images, targets = next(DenseSource(objects, PLAIN, 6, training=True).epoch(0))
    assert images.dtype == torch.float32 and images.shape == (6, 3, 96, 96)
    for target in targets:
        height, width = target["size"].tolist()
        assert target.keys() == {"size", "boxes", "labels", "masks"} and max(height, width) == 96
        assert target["masks"].shape == (len(target["boxes"]), 96, 96)
        assert target["masks"][:, :height, :width].any() and not target["masks"][:, height:].any()
    images, targets = next(DenseSource(pixels, PLAIN, 6, training=True).epoch(0))
    for image, target in zip(images, targets, strict=True):
        height, width = target["size"].tolist()
        assert target["labels"].shape == (96, 96) and target["labels"].dtype == torch.int64
        assert (target["labels"][height:] == 255).all() and (target["labels"][:, width:] == 255).all()
        assert not image[:, height:].any() and not image[:, :, width:].any() and image[:, :height, :width].any()


def test_evaluation_has_every_image_in_order_with_its_truths(objects: Samples) -> None:
    source = DenseSource(objects, PLAIN, 4, training=False)
    targets = [target for _, batch in source.epoch(0) for target in batch]
    assert source.batches == 2 and [int(target["image_id"]) for target in targets] == [1, 2, 3, 4, 5, 6]
    for target, one in zip(targets, photographs(), strict=True):
        assert target["original"].tolist() == [*one.picture.size[::-1]]
        wanted = torch.tensor([thing.box for thing in one.objects])
        torch.testing.assert_close(target["boxes"], wanted, atol=2e-3, rtol=0)
        assert {"labels", "iscrowd", "difficult", "areas", "masks"} <= target.keys()
        assert target["masks"].shape[1:] == one.picture.size[::-1]


@pytest.mark.parametrize("kind", ["objects", "pixels"])
def test_truths_of_an_evaluation_stay_where_they_are_judged(kind: str, request: pytest.FixtureRequest) -> None:
    """Each that has to come back from a GPU would wait for it."""
    samples, elsewhere = request.getfixturevalue(kind), statistics_of(FULL, torch.device("meta"))
    images, targets = unpack(Reader(samples, FULL, False, 0)[Request(0, [0, 1])], elsewhere)  # type: ignore[arg-type]
    assert images.is_meta and {tensor.device.type for target in targets for tensor in target.values()} == {"cpu"}
    images, targets = unpack(Reader(samples, FULL, True, 0)[Request(0, [0, 1])], elsewhere)  # type: ignore[arg-type]
    assert images.is_meta and all(target["labels"].is_meta and not target["size"].is_meta for target in targets)


def test_pixels_are_normalised(pixels: Samples) -> None:
    own = TransformSettings(160, "longest", mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    images, _ = next(DenseSource(pixels, own, 1, training=False).epoch(0))
    values = pixels.read(0).image.double().div(255)
    wanted = (values - torch.tensor(own.mean)[:, None, None]) / torch.tensor(own.std)[:, None, None]
    torch.testing.assert_close(images[0], wanted.float(), atol=1e-5, rtol=1e-5)


def test_images_without_objects_stay_in(folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "annotations" / "train.json").read_text())
    data["annotations"] = data["annotations"][:2]
    file = tmp_path / "one.json"
    file.write_text(json.dumps(data))
    samples, _ = open_dense(file, "detect", root=folder / "images" / "train", masks=True)
    _, targets = next(DenseSource(samples, PLAIN, 6, training=True).epoch(0))
    assert sorted(len(target["boxes"]) for target in targets) == [0, 0, 0, 0, 0, 2]
    empty = next(target for target in targets if not len(target["boxes"]))
    assert empty["boxes"].shape == (0, 4) and empty["masks"].shape == (0, 96, 96)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_one_line_that_names_it(workers: int, tmp_path: Path) -> None:
    broken = write_coco(tmp_path / "set")
    file = broken / "images" / "train" / "coffee.jpg"
    file.write_bytes(file.read_bytes()[:1500])
    source = DenseSource(open_dense(broken, "detect")[0], PLAIN, 2, training=True, workers=workers)
    with pytest.raises(LinvitError, match=r"cannot read image .*coffee.jpg") as caught:
        list(source.epoch(0))
    assert "\n" not in str(caught.value)
    source.close()


def test_a_batch_larger_than_the_set(objects: Samples) -> None:
    with pytest.raises(LinvitError, match="the set has 6 images, less than one batch of 8"):
        DenseSource(objects, PLAIN, 8, training=True)
