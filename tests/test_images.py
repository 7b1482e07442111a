"""Image files that are broken, hostile or merely unusual, for classification and dense tasks alike."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linvit.errors import LinvitError, Unreadable
from linvit.images import eight_bits, images_below, open_image, upright
from linvit.tasks.classify.data import Images, open_images
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import cache_key, decode
from linvit.tasks.classify.streaming import Streamed
from linvit.tasks.dense.files import Files
from linvit.tasks.dense.loading import DenseSource
from linvit.tasks.dense.pixels import read_image
from linvit.tasks.dense.readers import open_dense
from linvit.tasks.dense.transforms import TransformSettings
from linvit.tasks.digests import split_digest
from linvit.tasks.predicting import opened
from tests.dense_fixture import write_coco
from tests.tasks.classify.pictures import photographs

SIZE = Preprocessing((16, 16))


def fill(root: Path, *names: str) -> Path:
    for place, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        photographs()[place % 8].save(root / name)
    return root


def pets(root: Path, each: int = 4) -> Path:
    return fill(root, *(f"train/{name}/{i}.png" for name in ("cat", "dog") for i in range(each)))


# Links


def test_links_that_would_mislabel_are_refused(tmp_path: Path) -> None:
    for number, (link, target) in enumerate(
        [
            ("train/cat/loop", ".."),
            ("train/cat/loop", "../.."),
            ("train/cat/loop", "."),
            ("train/cat/other", "../dog"),
            ("train/dog/other", "../cat"),
            ("train/cat/checks", "../../val/dog"),
            ("train/cat/twice", "inner"),
            ("train/cat/root", "/"),
        ]
    ):
        folder = pets(tmp_path / f"set{number}")
        fill(folder, "train/cat/inner/1.png", "val/cat/1.png", "val/dog/1.png")
        (folder / link).symlink_to(target)
        with pytest.raises(LinvitError, match=r"leads to .*: remove the link"):
            open_images(folder, "train")


def test_links_to_what_lies_elsewhere_are_followed(tmp_path: Path) -> None:
    fill(tmp_path / "pool", "cats/1.png", "more/2.png", "dogs/3.png")
    folder = tmp_path / "set"
    (folder / "train" / "dog").mkdir(parents=True)
    (folder / "train" / "cat").symlink_to(tmp_path / "pool" / "cats")
    (folder / "train" / "dog" / "more").symlink_to(tmp_path / "pool" / "more")
    (folder / "train" / "dog" / "one.png").symlink_to(tmp_path / "pool" / "dogs" / "3.png")
    (folder / "val").symlink_to("train")
    for split in ("train", "validation"):
        images = open_images(folder, split)
        assert images.classes == ("cat", "dog") and images.labels.tolist() == [0, 1, 1]


def test_two_classes_that_are_one_folder(tmp_path: Path) -> None:
    folder = pets(tmp_path / "set")
    shutil.rmtree(folder / "train" / "dog")
    (folder / "train" / "dog").symlink_to("cat")
    with pytest.raises(LinvitError, match=r"train/dog leads to .*train/cat, which is read as .*train/cat too"):
        open_images(folder, "train")


def test_a_loop_in_a_dense_set(tmp_path: Path) -> None:
    for split in ("training", "validation"):
        fill(tmp_path / "set", f"images/{split}/1.jpg", f"annotations/{split}/1.png")
    (tmp_path / "set" / "images" / "training" / "loop").symlink_to("..")
    with pytest.raises(LinvitError, match=r"training/loop leads to .*: remove the link"):
        open_dense(tmp_path / "set", "segment")


# Formats


def test_other_formats_are_not_opened_whatever_they_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript."""
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **how: pytest.fail(f"{args} was started"))
    monkeypatch.setattr(subprocess, "check_call", lambda *args, **how: pytest.fail(f"{args} was started"))
    folder = pets(tmp_path / "set")
    for format in ("EPS", "PDF", "ICO"):
        file = folder / "train" / "cat" / "0.png"
        photographs()[0].save(file, format=format)
        for read in (
            lambda: open_images(folder, "train")[0],
            lambda file=file: opened(file),
            lambda file=file: read_image(Files(file.parent), "0.png", (32, 32), "somebody"),
        ):
            with pytest.raises(Unreadable, match=r"0\.png: it is none of JPEG, PNG, WEBP, BMP, TIFF, GIF, PPM"):
                read()


def test_phones_photographs_of_two_pictures_are_jpegs() -> None:
    file = io.BytesIO()
    photographs()[0].save(file, "MPO", save_all=True, append_images=[photographs()[1]])
    assert open_image(file.getvalue()).size == (32, 32)


@pytest.mark.parametrize("end", ["jpg", "png", "webp", "tif"])
def test_exif_rotation_is_honoured_by_every_reader(tmp_path: Path, end: str) -> None:
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:, :20] = 255  # the left is white; turned by 90° clockwise it is the top
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "set" / "cat" / f"1.{end}"
    file.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(file, exif=exif, **({"lossless": True} if end == "webp" else {}))

    images = open_images(tmp_path / "set", "train")
    whole = np.asarray(images[0][0].convert("RGB"))
    assert whole.shape == (40, 24, 3) and whole[:18].min() > 200 and whole[22:].max() < 50
    for turned in (opened(file), read_image(Files(file.parent), file.name, (40, 24), "somebody")):
        assert np.array_equal(turned.permute(1, 2, 0).numpy(), whole)
    plain = {"crop_scale": (1.0, 1.0), "crop_ratio": (0.6, 0.6), "flip": 0.0}
    for source in (
        Streamed(images, SIZE, 1, 1, augmentation=Augmentation(**plain)),
        Streamed(images, SIZE, 1, 1),
    ):
        ((batch, _),) = source.epoch(0)
        assert batch[0, :, 1].mean() > 1.5 and batch[0, :, -2].mean() < -1.5


def test_exif_that_is_none_turns_nothing(tmp_path: Path) -> None:
    photographs()[0].save(tmp_path / "1.jpg", exif=b"Exif\0\0II*\0" + b"\xff" * 40)
    with open(tmp_path / "1.jpg", "rb") as file:
        assert upright(open_image(file)).size == (32, 32)


def png(values: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write in colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    colours = {1: 0, 3: 2, 4: 6}[values.shape[2]]
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colours, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff(values: np.ndarray, **how: object) -> bytes:
    tifffile = pytest.importorskip("tifffile")  # Pillow writes none of 16 bits in colour
    file = io.BytesIO()
    kind = "minisblack" if values.shape[2] == 1 else "rgb"
    tifffile.imwrite(file, values if values.shape[2] > 1 else values[..., 0], photometric=kind, **how)
    return file.getvalue()


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_few_bits_in_sixteen_are_not_black(bits: int, channels: int) -> None:
    wanted = np.arange(256, dtype=np.uint16).reshape(16, 16, 1).repeat(channels, 2)
    values = wanted << (bits - 8)
    values[..., 3:] = 65535  # opaque
    files = [png(values)]
    if channels < 4:
        files += [tiff(values), tiff(values, byteorder=">"), tiff(values, compression="zlib")]
    for file in files:
        picture = open_image(file)
        found = np.asarray(eight_bits(picture)).reshape(16, 16, -1)
        assert np.array_equal(found[..., :3], wanted[..., :3]), picture.format
        assert channels < 4 or found[..., 3].min() == 255


# Names and kinds of files


def test_a_named_pipe_is_no_image(tmp_path: Path) -> None:
    """Whoever opens one waits until somebody writes into it."""
    folder = pets(tmp_path / "set")
    os.mkfifo(folder / "train" / "cat" / "pipe.jpg")
    os.mkfifo(tmp_path / "set.tar")
    for read in (
        lambda: open_images(folder, "train"),
        lambda: open_images(tmp_path / "set.tar", "train"),
        lambda: list(images_below(folder)),
        lambda: opened(folder / "train" / "cat" / "pipe.jpg"),
        lambda: Files(folder).read("train/cat/pipe.jpg"),
        lambda: Files(tmp_path / "set.tar"),
    ):
        with pytest.raises(LinvitError, match=r"is a named pipe: give a file"):
            read()


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = pets(tmp_path / "set")
    os.rename(folder / "train/cat/0.png", os.fsencode(folder) + b"/train/cat/caf\xe9.png")
    images = open_images(folder, "train")
    assert isinstance(images, Images) and len(decode(images, SIZE).labels) == 8
    assert len(cache_key(images, SIZE, True, (8, 3, 16, 16))) == 64 and len(split_digest(images)) == 16
    os.rename(folder / "train" / "dog", os.fsencode(folder) + b"/train/caf\xe9")
    with pytest.raises(LinvitError, match=r"class whose name cannot be printed \('caf\\udce9'\): rename its folder"):
        open_images(folder, "train")


# All that is broken at once


BROKEN = (1, 2, 9, 13)


@pytest.fixture
def damaged(tmp_path: Path) -> Images:
    folder = pets(tmp_path / "set", each=8)
    files = sorted(folder.rglob("*.png"))
    for index in BROKEN:
        files[index].write_bytes(files[index].read_bytes()[: 30 * index])
    files[13].unlink()
    files[13].symlink_to("nothing.png")
    images = open_images(folder, "train")
    assert isinstance(images, Images) and len(images) == 16
    return images


def named(error: Unreadable, images: Images) -> list[int]:
    """The images that an error names, each on its own line."""
    first, *lines = str(error).splitlines()
    assert first.startswith(f"cannot read {len(lines)} images")
    known = [images.filename(index) for index in range(len(images))]
    return [known.index(line.strip().split(": ")[0]) for line in lines]


@pytest.mark.parametrize("workers", [0, 1])
def test_streamed_sets_name_every_broken_file(damaged: Images, workers: int) -> None:
    for how in ({"augmentation": Augmentation(), "batch": 6, "workers": workers}, {"batch": 3, "workers": workers}):
        source = Streamed(damaged, SIZE, how.pop("batch"), 2, **how)
        with pytest.raises(Unreadable) as caught:
            list(source.epoch(0))
        assert named(caught.value, damaged) == list(BROKEN)
        source.close()


def test_what_fills_no_batch_hides_nothing(tmp_path: Path) -> None:
    images = open_images(pets(tmp_path / "set"), "train")
    source = Streamed(images, SIZE, 5, 2, augmentation=Augmentation())
    left = source.order.left_out(0)
    assert sorted([*left, *source.order.epoch(0)[0].tolist()]) == list(range(8)) and len(left) == 3
    Path(images.filename(left[1])).write_text("no image")
    with pytest.raises(Unreadable, match=images.filename(left[1])):
        next(source.epoch(0))


def test_resident_sets_name_every_broken_file(damaged: Images) -> None:
    with pytest.raises(Unreadable) as caught:
        decode(damaged, SIZE)
    assert named(caught.value, damaged) == list(BROKEN)


def test_dense_sets_name_every_broken_file(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "set")
    files = sorted((folder / "images" / "train").iterdir())
    for file in files[:2]:
        file.write_bytes(file.read_bytes()[:200])
    train = open_dense(folder, "detect")[0]
    settings = TransformSettings(size=32)
    for training in (True, False):
        with pytest.raises(Unreadable, match=r"cannot read 2 images; replace it or take it out:\n") as caught:
            list(DenseSource(train, settings, 1, training=training).epoch(0))
        assert all(str(file) in str(caught.value) for file in files[:2])
