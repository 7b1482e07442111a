"""A recipe means the same whether its set is resident or streamed, and wherever pictures are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from linvit.errors import LinvitError
from linvit.tasks.classify import streaming
from linvit.tasks.classify.data import Images, open_images
from linvit.tasks.classify.decoding import channels_first, cut, cut_all, decode_jpegs, plain_jpeg
from linvit.tasks.classify.preprocessing import CROP_COLUMNS, Augmentation, Preprocessing, frames_of
from linvit.tasks.classify.resident import Resident, decode
from linvit.tasks.classify.streaming import Streamed
from tests.tasks.classify.pictures import archive, photographs
from tests.tasks.classify.test_resident import equal

FULL = Augmentation(randaugment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0)
CROPS = Augmentation(crop_scale=(0.3, 1.0))
SHAPES = [(120, 90), (90, 120), (100, 100), (200, 96), (64, 64), (70, 64), (333, 250), (96, 201)]


def landscapes(shapes: Sequence[tuple[int, int]] = tuple(SHAPES), suffix: str = "JPEG") -> Images:
    """Photographs of many sizes, as files."""
    files = []
    for place, shape in enumerate(shapes):
        picture = Image.fromarray(load_sample_images().images[place % 2]).resize(shape, Image.Resampling.BOX)
        made = BytesIO()
        picture.save(made, suffix, quality=95)
        files.append(made.getvalue())

    class Files(list):
        def __getitem__(self, index):
            return BytesIO(files[index]), index % 4

    return Images("landscapes", Files(files), labels=[place % 4 for place in range(len(files))])


def in_grey_levels(a: Tensor, b: Tensor, chosen: Preprocessing) -> Tensor:
    return (a - b).abs() * 255 * torch.tensor(chosen.std).view(1, -1, 1, 1)


@pytest.mark.parametrize("augmentation", [FULL, Augmentation(colour_jitter=0.4), Augmentation(crop_scale=(1.0, 1.0))])
@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_of_the_models_size_have_the_same_bits(augmentation: Augmentation, workers: int) -> None:
    images = Images(
        "photographs", [(photographs()[i % 8], i % 5) for i in range(70)], labels=[i % 5 for i in range(70)]
    )
    chosen = Preprocessing((32, 32))
    place = {"augmentation": augmentation, "seed": 4, "rank": 1, "world": 2, "repeats": 2}
    resident = Resident(decode(images, chosen), chosen, 34, 5, **place)
    streamed = Streamed(images, chosen, 34, 5, workers=workers, **place)
    for epoch in (0, 3):
        assert equal(list(resident.epoch(epoch)), list(streamed.epoch(epoch)))
    assert equal(list(resident.epoch(1, mixed=False)), list(streamed.epoch(1, mixed=False)))


def test_an_archive_has_the_same_bits_resident_and_streamed() -> None:
    train = open_images(archive(), "train")
    train.source.samples, train.source.places = train.source.samples[::100], train.source.places[::100]
    chosen = Preprocessing((128, 128))
    resident = Resident(decode(train, chosen), chosen, 20, 10, augmentation=FULL)
    assert equal(list(resident.epoch(2)), list(Streamed(train, chosen, 20, 10, augmentation=FULL).epoch(2)))


def test_pictures_of_any_shape_are_cropped_alike() -> None:
    """The resident loader has less detail to crop from; what is seen is the same: a picture of two colour ramps tells
    for each pixel where it comes from."""
    shapes = [(250, 180), (180, 250), (300, 300), (400, 100)]
    pictures = []
    for width, height in shapes:
        across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
        pictures.append((Image.fromarray(np.stack([across, down, across], -1).astype(np.uint8)), 0))
    images = Images("ramps", pictures, labels=[0] * 4)
    chosen = Preprocessing((64, 64))
    for augmentation in (CROPS, Augmentation(crop_scale=(1.0, 1.0)), Augmentation(randaugment="rand-m3")):
        resident = Resident(decode(images, chosen), chosen, 4, 1, augmentation=augmentation)
        streamed = Streamed(images, chosen, 4, 1, augmentation=augmentation)
        for (ours, _), (theirs, _) in zip(resident.epoch(2), streamed.epoch(2), strict=True):
            apart = in_grey_levels(ours, theirs, chosen)
            assert apart.median() < 1.5 and apart.mean() < 4  # along the rims of turned pictures and of squeezed ones


def test_without_a_crop_the_middle_is_seen() -> None:
    shapes = torch.tensor([[375.0, 500.0], [500.0, 375.0], [224.0, 224.0], [60.0, 600.0]])
    frames = frames_of(shapes, (224, 224))
    assert frames.tolist() == [[224, 299], [299, 224], [224, 224], [224, 2240]]
    boxes = Augmentation(crop_scale=(1.0, 1.0)).draw_boxes(torch.rand(4, CROP_COLUMNS), frames, (224, 224))
    assert boxes.tolist() == [
        [0, 37, 224, 224],
        [37, 0, 224, 224],
        [0, 0, 224, 224],
        [0, 1008, 224, 224],
    ]


def test_frames_of_their_own_are_drawn_like_one_frame() -> None:
    u = torch.rand(500, CROP_COLUMNS)
    one = Augmentation().draw_boxes(u, (128, 96), (32, 32))
    each = Augmentation().draw_boxes(u, torch.tensor([[128.0, 96.0]]).expand(500, 2), (32, 32))
    assert torch.equal(one, each)


@pytest.mark.parametrize(("how", "most"), [("bilinear", 1), ("bicubic", 4)])  # Pillow cuts bicubic's overshoot twice
def test_crops_on_the_device_are_pillows(how: str, most: int) -> None:
    images = landscapes()
    pictures = [images[index][0] for index in range(len(images))]
    u = torch.rand(len(pictures), 4, generator=torch.Generator().manual_seed(0))
    shapes = torch.tensor([(p.height, p.width) for p in pictures])
    extent = (0.1 + 0.9 * u[:, :2]) * shapes
    boxes = torch.cat([u[:, 2:] * (shapes - extent), extent], dim=1)
    boxes[0] = torch.tensor([0, 0, *shapes[0]])
    found = cut_all([channels_first(p) for p in pictures], boxes, (48, 64), [how] * len(pictures))
    wanted = torch.stack([cut(p, box, (48, 64), "RGB", how) for p, box in zip(pictures, boxes.tolist(), strict=True)])
    apart = (found.int() - wanted.int()).abs()
    assert apart.max() <= most and apart.float().mean() < 0.3


def test_large_crops_and_two_filters_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [torch.full((3, 40 + 30 * i, 50), 10 * i, dtype=torch.uint8) for i in range(6)]
    boxes = torch.tensor([[0.0, 0, picture.shape[1], 50] for picture in pictures])
    monkeypatch.setattr("linvit.tasks.classify.decoding.LARGE", 100)
    found = cut_all(pictures, boxes, (8, 8), ["bilinear", "bicubic"] * 3)
    assert found[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]


def test_large_jpegs_are_decoded_at_a_smaller_scale() -> None:
    file = landscapes([(600, 400)]).source[0][0]
    small, whole = Image.open(file), Image.open(BytesIO(file.getvalue()))
    whole.load()
    box = (20.0, 30.0, 360.0, 540.0)
    found = cut(small, box, (40, 60), "RGB", "bilinear")
    assert small.size < (600, 400)
    apart = (found.int() - cut(whole, box, (40, 60), "RGB", "bilinear").int()).abs().float()
    assert apart.mean() < 3


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torchvision's decoder on the CPU in the place of the GPU's; what it was given to decode."""
    seen: list[int] = []

    def count(files: Sequence[Tensor], mode: str, device: torch.device) -> list[Tensor | None]:
        seen.append(len(files))
        return decode_jpegs(files, mode, device)

    monkeypatch.setattr(streaming, "decodes_jpegs", lambda device: True)
    monkeypatch.setattr(streaming, "decode_jpegs", count)
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_jpegs_decoded_on_the_device_are_the_same(decoder: list[int], workers: int) -> None:
    """All but the one of the model's own size, which is cropped later; the two decoders are one library here, and no
    picture is so large that Pillow would decode it at a smaller scale."""
    chosen, images = Preprocessing((64, 64)), landscapes([(120, 90), (90, 120), (64, 64), (70, 64)] * 2)
    wanted = next(Streamed(images, chosen, 8, 4, augmentation=CROPS, decoder="cpu").epoch(0))
    assert not decoder
    source = Streamed(images, chosen, 8, 4, augmentation=CROPS, workers=workers)
    found = next(source.epoch(0))
    assert decoder == [6] and source.note == "landscapes is streamed, its JPEGs decoded on the GPU"
    apart = in_grey_levels(found[0], wanted[0], chosen)
    assert apart.max() < 1.01 and torch.equal(found[1], wanted[1])


def test_other_files_are_left_to_pillow(decoder: list[int]) -> None:
    chosen = Preprocessing((48, 48))
    for suffix, count in (("PNG", 0), ("WEBP", 0), ("JPEG", 8)):
        decoder.clear()
        next(Streamed(landscapes(suffix=suffix), chosen, 8, 4, augmentation=CROPS).epoch(0))
        assert sum(decoder) == count
    cmyk = BytesIO()
    photographs()[0].convert("CMYK").save(cmyk, "JPEG")
    assert plain_jpeg(Image.open(cmyk), "RGB") == b"" and plain_jpeg(photographs()[0], "RGB") == b""
    file = landscapes().source[0][0]
    assert plain_jpeg(Image.open(file), "RGB") == file.getvalue() and plain_jpeg(Image.open(file), "L") == b""


def test_a_broken_jpeg_is_named_whoever_decodes(
    decoder: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(name: str, damage) -> Images:
        for place in range(4):
            path = tmp_path / name / "train" / f"class{place % 2}" / f"{place}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = landscapes().source[place][0].getvalue()
            path.write_bytes(damage(data) if place == 3 else data)
        return open_images(tmp_path / name, "train")

    chosen = Preprocessing((48, 48))
    short = folder("short", lambda data: data[: len(data) // 2])
    with pytest.raises(LinvitError, match=r"cannot read image .*class1/3.jpg: image file is truncated"):
        list(Streamed(short, chosen, 4, 2, augmentation=CROPS).epoch(0))
    rotten = folder("rotten", lambda data: data.replace(b"\xff\xc4\x00\x1f\x00", b"\xff\xc4\x00\x1f\x00\xff"))
    with pytest.raises(LinvitError, match=r"cannot read image .*class1/3.jpg: broken data stream"):
        list(Streamed(rotten, chosen, 4, 2, augmentation=CROPS).epoch(0))
    assert decoder == [4]
    good = folder("good", bytes)
    made = list(Streamed(good, chosen, 4, 2, augmentation=CROPS).epoch(0))
    monkeypatch.setattr(streaming, "decode_jpegs", lambda files, *_: [None] * len(files))
    again = list(Streamed(good, chosen, 4, 2, augmentation=CROPS).epoch(0))  # what the device gives up, Pillow decodes
    assert in_grey_levels(made[0][0], again[0][0], chosen).max() < 1.01


def test_only_what_cannot_be_decoded_is_left_out() -> None:
    files = [torch.frombuffer(bytearray(landscapes().source[i][0].getvalue()), dtype=torch.uint8) for i in range(5)]
    wanted = decode_jpegs(files, "RGB", torch.device("cpu"))
    files[3] = files[3][:100]
    found = decode_jpegs(files, "RGB", torch.device("cpu"))
    assert found[3] is None
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if i != 3)


def test_a_gpu_that_is_not_there_is_not_asked_for() -> None:
    with pytest.raises(LinvitError, match="cannot be decoded on cpu here"):
        Streamed(landscapes(), Preprocessing((48, 48)), 4, 4, augmentation=CROPS, decoder="gpu")
    with pytest.raises(LinvitError, match="unknown decoder 'tpu'"):
        Streamed(landscapes(), Preprocessing((48, 48)), 4, 4, augmentation=CROPS, decoder="tpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGpu:
    """The same on a GPU, where steps are made ahead and JPEGs decoded by it."""

    def test_pictures_of_the_models_size_are_the_same(self) -> None:
        images = Images("photographs", [(photographs()[i % 8], i % 5) for i in range(70)], labels=[0] * 70)
        chosen = Preprocessing((32, 32))
        resident = Resident(decode(images, chosen, device="cuda"), chosen, 10, 5, augmentation=FULL)
        streamed = Streamed(images, chosen, 10, 5, augmentation=FULL, device="cuda", workers=2)
        for epoch in (0, 1):
            for ours, theirs in zip(resident.epoch(epoch), streamed.epoch(epoch), strict=True):
                assert (ours[0] - theirs[0]).abs().mean() < 0.02  # a box may differ by a pixel: the host draws it
                torch.testing.assert_close(ours[1], theirs[1])

    def test_jpegs_decoded_by_it(self) -> None:
        chosen, images = Preprocessing((64, 64)), landscapes([(120, 90), (90, 120), (64, 64), (125, 127)] * 20)
        sources = [
            Streamed(images, chosen, 40, 4, augmentation=CROPS, device="cuda", decoder=decoder, workers=2)
            for decoder in ("gpu", "cpu")
        ]
        for epoch in (0, 1):
            for ours, theirs in zip(*(source.epoch(epoch) for source in sources), strict=True):
                apart = in_grey_levels(ours[0].cpu(), theirs[0].cpu(), chosen)
                assert apart.mean() < 3 and torch.equal(ours[1], theirs[1])

    def test_what_is_trained_on_is_not_overwritten(self) -> None:
        """Steps are made ahead on another stream: a batch in use must not become the next one's memory."""
        chosen, images = Preprocessing((64, 64)), landscapes([(120, 90), (90, 120)] * 64)
        wanted = [
            x.sum().item() for x, _ in Streamed(images, chosen, 16, 4, augmentation=CROPS, device="cuda").epoch(0)
        ]
        found = []
        for x, _ in Streamed(images, chosen, 16, 4, augmentation=CROPS, device="cuda").epoch(0):
            torch.cuda._sleep(50_000_000)
            found.append(x.sum())
        assert [value.item() for value in found] == wanted
