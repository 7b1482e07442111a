"""Sets by name, and every mistake in them as one line."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linvit.errors import LinvitError
from linvit.tasks.classify.data import Images, Stream, check_outputs, open_data, open_images, open_split
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing, seed_of
from linvit.tasks.classify.resident import cache_key
from linvit.tasks.digests import split_digest
from linvit.training.recipes import recipe
from tests.tasks.classify.pictures import archive, photographs


def make_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog10", "dog2"), each: int = 3) -> Path:
    for split in ("train", "val"):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i, picture in enumerate(photographs()[:each]):
                picture.save(root / split / name / f"{i}.png")
    return root


def make_archive(folder: Path, path: Path, prefix: str = "set") -> Path:
    with tarfile.open(path, "w") as archive:
        archive.add(folder, prefix)
    return path


def test_digits_are_split_without_overlap() -> None:
    train, validation = open_data("digits")
    assert (len(train), len(validation)) == (1437, 360)
    assert train.class_count == validation.class_count == 10
    assert set(validation.labels) == set(range(10))
    picture, label = train[0]
    assert picture.size == (8, 8) and label == int(train.labels[0])
    assert np.array(picture).max() == 255


def test_folder_and_archive_are_read_alike(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    packed = make_archive(folder, tmp_path / "set.tar")
    bare = make_archive(folder, tmp_path / "bare.tar", prefix=".")
    for split in ("train", "validation"):
        there = open_images(folder, split)
        assert there.classes == ("cat", "dog2", "dog10")  # timm's order counts numbers as numbers
        for path in (packed, bare):
            here = open_images(path, split)
            assert here.classes == there.classes and here.labels.tolist() == there.labels.tolist()
            for index in (0, 4, 8):
                assert here[index][0].tobytes() == there[index][0].tobytes()
        assert len(there) == 9


def test_an_archive_without_splits_is_one_split(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    flat = make_archive(folder / "train", tmp_path / "flat.tar", prefix="pictures")
    assert len(open_images(flat, "validation")) == len(open_images(folder / "train", "validation")) == 9


def test_images_without_classes_are_for_who_asks(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for split, count in (("train", 12), ("val", 3)):
        (folder / split).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / split / f"{i}.png")
    (folder / "train" / "notes.txt").write_text("no image")
    packed = make_archive(folder, tmp_path / "photos.tar")
    for data in (folder, packed):
        with pytest.raises(LinvitError, match=r"train has no class folders: images belong in .*train/CLASS/"):
            open_images(data)
        train, validation = open_data(data, unlabelled=True)
        assert (len(train), len(validation)) == (12, 3)
        for images in (train, validation):
            assert not images.labelled and images.classes == () and images.class_count is None
        reds = [picture.getpixel((0, 0))[0] for picture, _ in list_all(train)]
        assert reds == list(range(12)) and train.filename(10).endswith("train/10.png")
        check_outputs(train, 1)
    one = make_archive(folder / "train", tmp_path / "one.tar", prefix="holiday/train")
    for data in (folder / "train", one):  # nothing but images
        train, validation = open_data(data, unlabelled=True)
        assert (len(train), len(validation)) == (11, 1) and not (train.labelled or validation.labelled)
    labelled = make_folder(tmp_path / "pets")
    for file in (labelled / "train").rglob("*.png"):
        file.rename(labelled / "train" / f"{file.parent.name}{file.name}")
    for name in ("cat", "dog10", "dog2"):
        (labelled / "train" / name).rmdir()
    train, validation = open_data(labelled, unlabelled=True)
    assert not train.labelled and validation.labelled and validation.class_count == 3


def test_of_a_set_without_splits_some_is_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    sizes = {"a": 25, "b": 4, "c": 1}
    for name, count in sizes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (i, ord(name), 0)).save(folder / name / f"{i}.png")
    for data in (folder, make_archive(folder, tmp_path / "photos.tar")):
        train, validation = open_data(data)
        seen = [{picture.getpixel((0, 0)) for picture, _ in list_all(images)} for images in (train, validation)]
        assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 30
        assert np.bincount(validation.labels).tolist() == [2, 1]  # one of ten, the last of a few, never the only one
        assert train.classes == validation.classes == tuple(sizes)
        assert "3 of its 30 images are held out" in validation.note and not train.note
        assert validation.filename(2).endswith("b/3.png")
        assert [label for _, label in list_all(validation)] == validation.labels.tolist()
        assert len(open_images(data, "validation")) == 30  # who asks for one split gets all there is
        known = {cache_key(images, Preprocessing((8, 8)), False, (8, 8)) for images in (train, validation)}
        assert len(known | {split_digest(train), split_digest(validation)}) == 4
    with pytest.raises(LinvitError, match="too few images to hold some out"):
        open_data(make_archive(folder / "c", tmp_path / "one.tar"), unlabelled=True)


def test_one_split_is_as_training_takes_it(tmp_path: Path) -> None:
    flat = tmp_path / "photos"
    for name, count in {"a": 25, "b": 4}.items():
        (flat / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (i, ord(name), 0)).save(flat / name / f"{i}.png")
    split = make_folder(tmp_path / "set")
    for data in (flat, make_archive(flat, tmp_path / "photos.tar"), split, "digits"):
        for name, wanted in zip(("train", "validation"), open_data(data), strict=True):
            found = open_split(data, name)
            assert split_digest(found) == split_digest(wanted) and found.note == wanted.note
    assert len(open_split(flat, "all")) == 29
    with pytest.raises(LinvitError, match="unknown split 'vlidation'; did you mean validation"):
        open_split(flat, "vlidation")


@pytest.mark.parametrize("prefix", ["set", "."])
def test_loose_images_beside_class_folders_are_named(prefix: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    photographs()[0].save(folder / "cover.png")  # beside the splits, it belongs to none
    assert len(open_images(folder)) == len(open_images(make_archive(folder, tmp_path / "a.tar", prefix))) == 9
    for name in ("x10.png", "x2.png"):
        photographs()[0].save(folder / "val" / name)
    told = r"has 2 images beside its class folders \(x2.png\): move"
    for data in (folder, folder / "val", make_archive(folder, tmp_path / "b.tar", prefix)):
        with pytest.raises(LinvitError, match=told):
            open_images(data, "validation")
    with pytest.raises(LinvitError, match=told):
        open_data(make_archive(folder / "val", tmp_path / "c.tar", prefix), unlabelled=True)


def test_imagenette_is_read_in_place() -> None:
    train, validation = open_data(archive())
    assert (len(train), len(validation)) == (6000, 2000)
    assert train.classes == validation.classes and len(train.classes) == 10
    assert np.bincount(train.labels).tolist() == [600] * 10
    assert train[123][0].size == (128, 128)


def test_a_named_set_comes_through_timm(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    found = open_images("torch/image_folder", "train", root=folder)
    assert isinstance(found, Images) and len(found) == 9 and found.class_count == 3
    assert found[4][1] == 1
    assert isinstance(open_images("wds/some", "train", root=tmp_path), Stream)


def break_image(root: Path) -> Path:
    path = root / "train" / "dog2" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    return root


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    (folder / "train" / "empty").mkdir()
    lacking = make_folder(tmp_path / "lacking")
    for file in (lacking / "val" / "dog2").iterdir():
        file.unlink()
    (lacking / "val" / "dog2").rmdir()
    alien = make_folder(tmp_path / "alien")
    (alien / "val" / "cat").rename(alien / "val" / "cow")
    loose = tmp_path / "loose"
    (loose / "train").mkdir(parents=True)
    photographs()[0].save(loose / "train" / "a.png")
    broken = break_image(make_folder(tmp_path / "broken"))
    packed = make_archive(broken, tmp_path / "broken.tar")
    compressed = tmp_path / "set.tar.gz"
    with tarfile.open(compressed, "w:gz") as inside:
        inside.add(broken, "set")
    (tmp_path / "nothing.tar").write_bytes(io.BytesIO(b"x" * 2048).getvalue())
    (tmp_path / "text.txt").write_text("no images")
    only = make_folder(tmp_path / "only")
    (only / "train").rename(only / "val2")
    for message, attempt in {
        r"class folder .*train/empty holds no image": lambda: open_images(folder, "train"),
        r"no data at .*/pet; did you mean .*/pets\?": lambda: open_images(tmp_path / "pet", "train"),
        r"'there' in it does not": lambda: open_images(tmp_path / "there" / "deep", "train"),
        r"val has no image of class 'dog2', which the training set has": lambda: open_data(lacking),
        r"val has no image of class 'cat'": lambda: open_data(alien),
        r"has no class folders": lambda: open_images(loose, "train"),
        r"cannot read image .*/train/dog2/1.png: .*(truncated|broken)": lambda: list_all(open_images(broken, "train")),
        r"cannot read image .*broken.tar:set/train/dog2/1.png": lambda: list_all(open_images(packed, "train")),
        r"cannot be read as an archive.*unpacked": lambda: open_images(compressed, "train"),
        r"nothing.tar cannot be read as an archive": lambda: open_images(tmp_path / "nothing.tar", "train"),
        r"neither an image folder nor a .tar archive": lambda: open_images(tmp_path / "text.txt", "train"),
        r"no folder for the split 'train' \(looked for train, training\)": lambda: open_images(only, "train"),
        r"unknown split 'trian'; did you mean train": lambda: open_images("digits", "trian"),
        r"cannot open torch/cifar10: .*not found": lambda: open_images("torch/cifar10", "train", root=tmp_path),
        r"cannot open torch/imagnet: Unknown": lambda: open_images("torch/imagnet", "train", root=tmp_path),
        r"digits has 10 classes, the model 7 outputs: create it with num_classes=10": lambda: check_outputs(
            open_images("digits"), 7
        ),
        r"set has label 3: labels must run from 0 to 1": lambda: Images("set", [], classes="ab", labels=[0, 3]),
        r"set has label -1: labels must run from 0 upwards": lambda: Images("set", [], labels=[0, -1]),
        r"takes 4 channels": lambda: Preprocessing((8, 8), (0.5,) * 4, (0.5,) * 4).mode,
    }.items():
        with pytest.raises(LinvitError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)


def list_all(images: Images) -> list[tuple[Image.Image, int]]:
    return [images[i] for i in range(len(images))]


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    for name, package in (("hfds/some/set", "datasets"), ("wds/set", "webdataset")):
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(LinvitError, match=f"needs the package {package}"):
                found = open_images(name, "train", root=tmp_path)
                len(found)


def test_preprocessing_and_augmentation_follow_model_and_recipe() -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, in_chans=1, depth=1, num_classes=3)
    found = Preprocessing.of(model)
    assert found.size == (64, 64) and found.mean == (0.5,) and found.mode == "L" and found.crop == 0.9
    assert Preprocessing.of(model, 48, 1.0).size == (48, 48)
    chosen = Augmentation.of(recipe("deit"))
    assert (chosen.mixup, chosen.cutmix, chosen.erasing, chosen.randaugment) == (0.8, 1.0, 0.25, "rand-m9-mstd0.5-inc1")


def test_seeds_are_apart() -> None:
    assert len({seed_of(a, b, c) for a in range(5) for b in range(5) for c in range(5)}) == 125
