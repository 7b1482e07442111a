"""Image folders and archives: which files are images, and which folder is the class of one."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm.data.readers.img_extensions import get_img_extensions
from timm.data.readers.reader_image_folder import ReaderImageFolder

from linvit.errors import LinvitError
from linvit.tasks.classify.data import Images, open_data, open_images
from linvit.tasks.classify.readers import number_classes
from linvit.tasks.digests import split_digest
from tests.tasks.classify.pictures import photographs


def fill(root: Path, *names: str) -> Path:
    """A set of these files, each with a photograph of its own."""
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        photographs()[i % 8].save(root / name)
    return root


def pack(folder: Path, prefix: str = "set") -> Path:
    path = folder.with_name(f"{folder.name}-{prefix}.tar")
    with tarfile.open(path, "w") as archive:
        archive.add(folder, prefix)
    return path


def forms(folder: Path) -> tuple[Path, ...]:
    """A folder, an archive of it, and one without a folder around."""
    return folder, pack(folder), pack(folder, ".")


def labels_of(images: Images, root: Path) -> dict[str, str]:
    """The class of each file, told by the photograph, as there is one of each in this folder."""
    assert images.labels is not None
    known = {Image.open(file).tobytes(): str(file.relative_to(root)) for file in root.rglob("*.png")}
    found = {}
    for i in range(len(images)):
        picture, label = images[i]
        assert label == images.labels[i]
        found[known[picture.tobytes()]] = images.classes[label]
    return found


NESTED = [f"{name}/{part}/{name}.png" for name in ("cat", "dog") for part in ("a", "b")]


def test_a_class_is_the_first_folder_below_the_split(tmp_path: Path) -> None:
    names = (*NESTED, "cat/x.png", "dog/a/b/c/y.png")
    folder = fill(tmp_path / "pets", *(f"train/{name}" for name in names))
    fill(folder, *(f"val/{name}" for name in NESTED))
    for data in forms(folder):
        train, validation = open_data(data)
        assert train.classes == validation.classes == ("cat", "dog")
        assert labels_of(train, folder / "train") == {name: name[:3] for name in names}
        assert np.bincount(validation.labels).tolist() == [2, 2]
        assert [Path(validation.filename(i)).stem for i in range(4)] == ["cat", "cat", "dog", "dog"]
        assert validation.labels.tolist() == [0, 0, 1, 1]


def test_classes_that_share_their_inner_folder_are_told_apart(tmp_path: Path) -> None:
    names = [f"n{i}/images/{j}.png" for i in (10, 2) for j in range(3)]
    folder = fill(tmp_path / "tiny", *(f"{split}/{name}" for split in ("train", "val") for name in names))
    for data in (*forms(folder), *forms(folder / "train")):
        train, validation = open_data(data)
        assert train.classes == validation.classes == ("n2", "n10")
        assert set(train.labels) == set(validation.labels) == {0, 1}


def test_a_folder_around_all_is_no_class(tmp_path: Path) -> None:
    folder = fill(tmp_path / "a" / "pets", *NESTED)
    for data in (tmp_path / "a", *forms(folder)):
        whole = open_images(data)
        assert whole.classes == ("cat", "dog") and whole.labels.tolist() == [0, 0, 1, 1]
    assert Path(open_images(tmp_path / "a").source.filename(0)).parts == ("pets", "cat", "a", "cat.png")
    split = fill(tmp_path / "b" / "pets", *(f"{split}/{name}" for split in ("train", "val") for name in NESTED))
    for data in (tmp_path / "b", split):
        train, validation = open_data(data)
        assert train.classes == ("cat", "dog") and len(train) == len(validation) == 4
    loose = fill(tmp_path / "c" / "pets", "train/1.png", "val/2.png")
    with pytest.raises(LinvitError, match=r"c/pets/train has no class folders"):
        open_images(loose.parent)
    assert [len(images) for images in open_data(loose.parent, unlabelled=True)] == [1, 1]
    assert open_images(fill(tmp_path / "d", "cat/images/1.png")).classes == ("cat",)


def test_classes_one_folder_too_deep_are_an_error(tmp_path: Path) -> None:
    folder = fill(tmp_path / "pets", *(f"{split}/all/{name}" for split in ("train", "val") for name in NESTED))
    for data in forms(folder):
        with pytest.raises(LinvitError, match=r"train\)? has one class, 'all', with folders of images in it: if those"):
            open_data(data)
        assert open_images(data, "validation").classes == ("all",)  # one may measure a single class
    flat = fill(tmp_path / "cats", *(f"{split}/cat/images/{i}.png" for split in ("train", "val") for i in range(2)))
    for data in forms(flat):
        assert open_data(data)[0].classes == ("cat",)


def test_checks_look_at_the_first_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "pets", *(f"train/{name}" for name in NESTED), "val/cat/a/1.png", "val/cat/b/2.png")
    for data in forms(folder):
        with pytest.raises(LinvitError, match="has no image of class 'dog', which the training set has"):
            open_data(data)
    fill(folder, "val/dog/a/1.png", "val/cow/a/1.png")
    for data in forms(folder):
        with pytest.raises(LinvitError, match="has class 'cow', which the training set has not"):
            open_data(data)
    (folder / "train" / "empty" / "deeper").mkdir(parents=True)
    with pytest.raises(LinvitError, match=r"class folder .*train/empty holds no image"):
        open_images(folder)


def test_flat_sets_are_numbered_and_ordered_as_by_timm(tmp_path: Path) -> None:
    names = [f"{name}/{i}{end}" for name in ("n10", "n2", "Zebra", "ant") for i, end in ((10, ".png"), (9, ".JPG"))]
    folder = fill(tmp_path / "set", *(f"{split}/{name}" for split in ("train", "val") for name in names))
    (folder / "train" / "ant" / "notes.txt").write_text("no image")
    reader = ReaderImageFolder(str(folder / "train"))
    found = open_images(folder)
    assert found.source.samples == reader.samples and found.source.class_to_idx == reader.class_to_idx
    assert list(found.classes) == list(reader.class_to_idx) == ["ant", "n2", "n10", "Zebra"]
    assert [found.source.filename(i) for i in range(len(found))] == reader.filenames()
    given = Images("set", reader, classes=tuple(reader.class_to_idx), labels=[label for _, label in reader.samples])
    given.filename = lambda index: reader.filename(index, absolute=True)
    assert split_digest(found) == split_digest(given)
    for data in forms(folder)[1:]:
        assert open_images(data).classes == found.classes
        assert open_images(data).labels.tolist() == found.labels.tolist()


def test_names_that_timm_holds_for_one_have_an_order() -> None:
    assert all(list(number_classes(names)) == ["A01", "a1", "b"] for names in (("b", "a1", "A01"), ("A01", "a1", "b")))


def test_photographs_of_many_types_are_read(tmp_path: Path) -> None:
    photo = photographs()[0]
    ends = ["png", "bmp", "tif", "tiff", "webp", "PNG", "BMP", "Tif", "TIFF", "WebP"]
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            place = tmp_path / "set" / split / name
            place.mkdir(parents=True)
            for i, end in enumerate(ends):
                photo.save(place / f"{i}.{end}", **({"lossless": True} if end.lower() == "webp" else {}))
            (place / "notes.txt").write_text("no image")
            (place / "tif").write_text("nor this")
    before = get_img_extensions()
    for data in forms(tmp_path / "set"):
        for images in open_data(data):
            assert images.labels.tolist() == [0] * len(ends) + [1] * len(ends)
            for i in range(len(images)):
                picture, _ = images[i]
                assert picture.convert("RGB").tobytes() == photo.tobytes(), images.filename(i)
    assert get_img_extensions() == before


def test_jfif_and_the_first_frame_of_a_gif(tmp_path: Path) -> None:
    photo, other = photographs()[:2]
    (tmp_path / "set" / "cat").mkdir(parents=True)
    frames = [picture.quantize(64) for picture in (photo, other)]
    frames[0].save(tmp_path / "set" / "cat" / "1.gif", save_all=True, append_images=frames[1:])
    photo.save(tmp_path / "set" / "cat" / "2.JFIF", format="jpeg")
    photo.save(tmp_path / "2.jpg")
    for data in (tmp_path / "set", tmp_path / "set" / "cat", pack(tmp_path / "set")):
        images = open_images(data, unlabelled=True)
        assert len(images) == 2
        assert images[0][0].convert("RGB").tobytes() == frames[0].convert("RGB").tobytes()
        assert images[1][0].tobytes() == Image.open(tmp_path / "2.jpg").tobytes()


def test_loose_images_of_any_type_are_seen(tmp_path: Path) -> None:
    folder = fill(tmp_path / "set", "train/cat/1.webp", "train/dog/1.bmp", "train/2.TIFF", "val/cat/1.webp")
    for data in forms(folder):
        with pytest.raises(LinvitError, match=r"has 1 image beside its class folders \(2.TIFF\)"):
            open_images(data)
