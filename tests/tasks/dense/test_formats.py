"""Every format gives the same photographs, objects and labels."""

import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from scipy.ndimage import binary_dilation, binary_erosion

from linvit.errors import LinvitError
from linvit.tasks.dense.readers import open_dense, open_dense_split
from linvit.tasks.dense.samples import DetectSamples, match_categories
from tests.dense_fixture import CATEGORIES, Photograph, photographs, write_ade, write_coco, write_voc

ARCHIVE = Path(__file__).parents[4] / "shared" / "data" / "voc256.tar"
Write = Callable[[Path], Path]


def packed(folder: Path) -> Path:
    """A folder in an archive, with a folder around it."""
    with tarfile.open(folder.with_suffix(".tar"), "w") as archive:
        archive.add(folder, arcname=f"./around/{folder.name}")
    return folder.with_suffix(".tar")


def boxes_of(one: Photograph) -> torch.Tensor:
    return torch.tensor([thing.box for thing in one.objects])


@pytest.mark.parametrize("write", [write_coco, write_voc])
@pytest.mark.parametrize("archived", [False, True])
def test_objects(write: Write, archived: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "set")
    for samples, mirrored in zip(
        open_dense(packed(folder) if archived else folder, "detect"), (False, True), strict=True
    ):
        assert samples.task == "detect" and samples.categories == CATEGORIES and not samples.note
        assert len(samples) == 6
        for index, one in enumerate(photographs(mirrored=mirrored)):
            found = samples.read(index)
            assert found.image.dtype == torch.uint8 and found.image.shape == (3, *one.picture.size[::-1])
            assert np.abs(found.image.permute(1, 2, 0).numpy() - np.array(one.picture, dtype=int)).mean() < 4  # JPEG
            torch.testing.assert_close(found.boxes, boxes_of(one), atol=2e-3, rtol=0)
            assert [CATEGORIES[label] for label in found.labels] == [thing.category for thing in one.objects]
            assert not found.iscrowd.any() and not found.difficult.any() and found.masks is None


@pytest.mark.parametrize("write", [write_coco, write_voc])
def test_masks_of_objects(write: Write, tmp_path: Path) -> None:
    samples = open_dense_split(write(tmp_path / "set"), "detect", "val", masks=True)
    for index, one in enumerate(photographs(mirrored=True)):
        found = samples.read(index).masks
        assert found.dtype == torch.uint8 and found.shape == (len(one.objects), *one.picture.size[::-1])
        for place, mask in enumerate(found.numpy().astype(bool), start=1):
            wanted, around = one.numbers() == place, np.ones((3, 3))
            if write is write_voc:
                assert (mask == wanted).all()
            else:  # Pillow rounds an outline's points
                inner, outer = binary_erosion(wanted, around), binary_dilation(wanted, around)
                assert (inner <= mask).all() and (mask <= outer).all()


def test_masks_are_cocos_own(tmp_path: Path) -> None:
    """Polygons, and RLE of both kinds, are drawn as pycocotools draws them."""
    folder = write_coco(tmp_path)
    file = folder / "annotations" / "train.json"
    data, coco = json.loads(file.read_text()), COCO(str(file))
    for place, one in enumerate(data["annotations"]):
        drawn = coco.annToMask(one)
        one["segmentation"] = [one["segmentation"], plain_rle(drawn), compressed_rle(coco, one)][place % 3]
        one["wanted"] = drawn.tolist()
    file.write_text(json.dumps(data))
    samples = open_dense_split(folder, "detect", "train", masks=True)
    found = [mask.tolist() for index in range(len(samples)) for mask in samples.read(index).masks]
    assert found == [one["wanted"] for one in data["annotations"]]


def plain_rle(mask: np.ndarray) -> dict[str, list[int]]:
    flat = mask.flatten(order="F")
    ends = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *ends, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": [0, *runs] if flat[0] else runs}


def compressed_rle(coco: COCO, one: dict) -> dict[str, object]:
    rle = coco.annToRLE(one)
    return {"size": rle["size"], "counts": rle["counts"].decode()}


@pytest.mark.parametrize(
    ("write", "background"), [(write_coco, True), (write_voc, True), (write_ade, False)], ids=["coco", "voc", "ade"]
)
@pytest.mark.parametrize("archived", [False, True])
def test_maps_of_labels(write: Write, background: bool, archived: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "set")
    train, validation = open_dense(packed(folder) if archived else folder, "segment")
    assert train.categories == validation.categories == (("background",) if background else ()) + CATEGORIES
    found = {Path(samples.filename(i)).stem.split("_")[-1]: samples.read(i) for samples in (train,) for i in range(6)}
    for one in photographs():
        wanted = torch.from_numpy(one.labels()).long()
        sample = found[one.name.split("_")[-1]]
        assert sample.labels.dtype == torch.int64 and sample.boxes is None
        assert torch.equal(sample.labels, wanted if background else torch.where(wanted == 0, 255, wanted - 1))


def test_cocos_own_names(tmp_path: Path) -> None:
    """`instances_train2017.json` with `train2017/` beside the folder of annotations; ids with gaps, in any order."""
    folder = write_coco(tmp_path)
    for split in ("train", "val"):
        (folder / "images" / split).rename(folder / f"{split}2017")
        file = folder / "annotations" / f"{split}.json"
        data = json.loads(file.read_text())
        for one in data["annotations"]:
            one["category_id"] = 90 - 10 * one["category_id"]
        data["categories"] = [{"id": 90 - 10 * one["id"], "name": one["name"]} for one in data["categories"]]
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(data))
        file.unlink()
    train, validation = open_dense(folder, "detect")
    assert train.categories == validation.categories == CATEGORIES[::-1]
    assert [train.categories[label] for label in train.read(0).labels] == ["person", "rocket"]


def test_labelling_tools_put_the_list_beside_the_images(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "set")
    for split, name in (("train", "train"), ("val", "valid")):
        (folder / "images" / split).rename(folder / name)
        (folder / "annotations" / f"{split}.json").rename(folder / name / "_annotations.coco.json")
    assert [len(samples) for samples in open_dense(folder, "detect")] == [6, 6]


def test_one_file_with_its_images_elsewhere(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "set")
    (folder / "images" / "val").rename(tmp_path / "elsewhere")
    file = folder / "annotations" / "val.json"
    samples, none = open_dense(file, "detect", root=tmp_path / "elsewhere")
    assert none is None and samples.read(5).image.shape == (3, 160, 160)
    with pytest.raises(LinvitError, match=r"val.json names astronaut.jpg, which is not there \(looked in"):
        open_dense(file, "detect")


def test_crowds_and_difficult_ones_are_told(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "coco")
    file = folder / "annotations" / "train.json"
    data = json.loads(file.read_text())
    data["annotations"][0]["iscrowd"] = data["annotations"][1]["difficult"] = 1
    data["annotations"][1]["area"] = 7.5
    data["annotations"] = [one for one in data["annotations"] if one["image_id"] != 2]
    file.write_text(json.dumps(data))
    samples = open_dense_split(folder, "detect", "train")
    assert isinstance(samples, DetectSamples)
    found, empty = samples.read(0), samples.read(1)
    assert found.iscrowd.tolist() == [True, False] and found.difficult.tolist() == [False, True]
    assert found.areas[1] == 7.5
    assert empty.boxes.shape == (0, 4) and len(empty.labels) == 0
    voc = write_voc(tmp_path / "voc")
    xml = voc / "Annotations" / "train_astronaut.xml"
    xml.write_text(xml.read_text().replace("<difficult>0</difficult>", "<difficult>1</difficult>", 1))
    assert open_dense_split(voc, "detect", "train").read(0).difficult.tolist() == [True, False]


def test_vocs_pixels_count_from_one(tmp_path: Path) -> None:
    """A box over the whole image is (1, 1, width, height) in VOC, and (0, 0, width, height) here."""
    folder = write_voc(tmp_path / "VOCdevkit" / "VOC2012")
    (folder / "classes.txt").unlink()
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>160</xmax><ymax>160</ymax></bndbox>"
    size = "<size><width>160</width><height>160</height></size>"
    text = f"<annotation>{size}<object><name>dog</name>{box}</object></annotation>"
    (folder / "Annotations" / "train_astronaut.xml").write_text(text)
    (folder / "ImageSets" / "Main" / "trainval.txt").write_text("train_astronaut  1\n")
    segments = open_dense_split(tmp_path / "VOCdevkit", "segment", "train")
    assert len(segments.categories) == 21 and segments.categories[:2] == ("background", "aeroplane")
    (folder / "classes.txt").write_text("\n".join(CATEGORIES))  # of which 0, the background, is none
    listed = open_dense_split(tmp_path / "VOCdevkit", "segment", "train")
    assert listed.categories == ("background", *CATEGORIES) and listed.read(0).labels.unique().tolist() == [0, 4, 5]
    (folder / "classes.txt").unlink()
    samples = open_dense_split(tmp_path / "VOCdevkit", "detect", "trainval")
    assert samples.read(0).boxes.tolist() == [[0, 0, 160, 160]]
    assert len(samples.categories) == 20 and samples.categories[samples.read(0).labels[0]] == "dog"


@pytest.mark.parametrize(
    ("listing", "categories", "labels"),
    [
        (("classes.txt", "no\n" + "\n".join(CATEGORIES)), ("no", *CATEGORIES), [0, 4, 5]),
        (("classes.json", json.dumps(["no", *CATEGORIES])), ("no", *CATEGORIES), [0, 4, 5]),
        (("classes.json", json.dumps({i + 1: name for i, name in enumerate(CATEGORIES)})), CATEGORIES, [3, 4, 255]),
        (None, tuple(f"class {i}" for i in range(6)), [0, 4, 5]),
    ],
)
def test_names_of_mask_folders(
    listing: tuple[str, str] | None, categories: tuple[str, ...], labels: list[int], tmp_path: Path
) -> None:
    folder = write_ade(tmp_path / "set")
    (folder / "objectInfo150.txt").unlink()
    (folder / "annotations").rename(folder / "masks")
    if listing:
        (folder / listing[0]).write_text(listing[1])
    samples, _ = open_dense(folder, "segment")
    assert samples.categories == categories and samples.read(0).labels.unique().tolist() == labels
    assert ("names no categories" in samples.note) == (listing is None)


def test_pictures_are_turned_as_their_exif_says_unless_annotations_know_better(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    file = folder / "images" / "train" / "chelsea.jpg"
    upright = Image.open(file).copy()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter to the right
    upright.transpose(Image.Transpose.ROTATE_90).save(file, exif=exif, quality=95)
    samples = open_dense_split(folder, "detect", "train")
    assert samples.read(1).image.shape == (3, upright.height, upright.width)
    assert np.abs(samples.read(1).image.permute(1, 2, 0).numpy() - np.array(upright, dtype=int)).mean() < 4
    note = folder / "annotations" / "train.json"
    data = json.loads(note.read_text())
    data["images"][1] |= {"width": upright.height, "height": upright.width}
    note.write_text(json.dumps(data))
    assert open_dense_split(folder, "detect", "train").read(1).image.shape == (3, upright.width, upright.height)
    mask = folder / "masks" / "train" / "chelsea.png"
    assert open_dense_split(folder, "segment", "train").read(1).image.shape == (3, upright.height, upright.width)
    Image.open(mask).transpose(Image.Transpose.ROTATE_90).save(mask)
    assert open_dense_split(folder, "segment", "train").read(1).image.shape == (3, upright.width, upright.height)


def test_without_sizes_the_files_are_asked(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    note = folder / "annotations" / "train.json"
    data = json.loads(note.read_text())
    for one in data["images"]:
        del one["width"], one["height"]
    note.write_text(json.dumps(data))
    rows = open_dense_split(folder, "detect", "train").rows
    assert [row.size for row in rows] == [one.picture.size[::-1] for one in photographs()]


def test_no_validation_split(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    (folder / "annotations" / "val.json").unlink()
    assert open_dense(folder, "detect")[1] is None


def test_validation_and_models_may_number_categories_otherwise(tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    note = folder / "annotations" / "val.json"
    data = json.loads(note.read_text())
    data["categories"] = [{"id": 6 - one["id"], "name": one["name"]} for one in data["categories"] if one["id"] > 1]
    data["annotations"] = [
        one | {"category_id": 6 - one["category_id"]} for one in data["annotations"] if one["category_id"] > 1
    ]
    note.write_text(json.dumps(data))
    train, validation = open_dense(folder, "detect")
    assert validation.categories == train.categories
    assert validation.read(0).labels.tolist() == train.read(0).labels.tolist() == [3, 4]
    names = ("rocket", "dog", *CATEGORIES[:4])
    assert match_categories(train, names).read(0).labels.tolist() == [5, 0]
    segments, _ = open_dense(write_ade(tmp_path / "ade"), "segment")
    assert match_categories(segments, names).read(0).labels.unique().tolist() == [0, 5, 255]
    with pytest.raises(LinvitError, match="has category 'cat' and 3 more, which the model does not know"):
        match_categories(train, ("rocket", "dog"))


def test_samples_travel_to_workers(tmp_path: Path) -> None:
    for path in (folder := write_coco(tmp_path / "set"), packed(folder)):
        samples, _ = open_dense(path, "detect", masks=True)
        samples.read(0)
        again = pickle.loads(pickle.dumps(samples))
        assert torch.equal(again.read(3).masks, samples.read(3).masks)


def test_a_real_archive() -> None:
    if not ARCHIVE.exists():
        pytest.skip(f"needs {ARCHIVE.name}, an archive of photographs that is not part of the repository")
    train, validation = open_dense(ARCHIVE, "detect")
    assert (len(train), len(validation), len(train.categories)) == (700, 300, 20)
    assert sum(len(train.read(index).labels) for index in range(0, 700, 70)) > 10
    segments, _ = open_dense(ARCHIVE, "segment")
    assert segments.categories == ("background", *train.categories)
    assert segments.read(0).labels.unique().tolist() == [0, 1, 15, 255]
