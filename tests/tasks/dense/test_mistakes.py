"""What can be wrong with a set is said in one line that names the place and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from linvit.errors import LinvitError
from linvit.tasks.dense.readers import open_dense, open_dense_split
from tests.dense_fixture import write_ade, write_coco, write_voc

Change = Callable[[dict[str, Any]], object]


def changed(folder: Path, change: Change, split: str = "train") -> Path:
    """A set of COCO's format after a change to its list."""
    file = folder / "annotations" / f"{split}.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["images"].clear(), "train.json has no image: put some in"),
        (lambda d: d.pop("categories"), "is not in COCO's format: it has no list of categories"),
        (lambda d: d["images"][0].pop("file_name"), "is not in COCO's format: KeyError 'file_name'"),
        (
            lambda d: d["annotations"][3].update(image_id=99),
            "annotation 30 is for image 99, which is not listed: add it",
        ),
        (lambda d: d["annotations"][3].update(category_id=99), "annotation 30 has category 99, which is not listed"),
        (lambda d: d["annotations"][3].update(bbox=[1, 2, 3]), "annotation 30 has no box: give left, top, width and"),
        (
            lambda d: d["images"][2].update(file_name="tea.jpg"),
            r"train.json names tea.jpg, which is not in .*train: put",
        ),
        (lambda d: d["images"][2].update(id=1), "has two images of one id"),
        (lambda d: d["categories"][2].update(name="cat"), r"\(train\) has two categories called 'cat': rename one"),
    ],
)
def test_lists(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(LinvitError, match=message) as caught:
        open_dense(changed(write_coco(tmp_path), change), "detect")
    assert "\n" not in str(caught.value)


def test_boxes_are_clipped_and_what_is_outside_is_counted(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        boxes = [[-10, 20, 500, 30], [200, 10, 20, 20], [5, 5, 0, 9], [5, 5, 9, float("nan")], [0, 0, 160, 107]]
        for one, box in zip(data["annotations"], boxes, strict=False):
            one["bbox"] = box

    samples, _ = open_dense(changed(write_coco(tmp_path), change), "detect")
    assert samples.read(0).boxes.tolist() == [[0, 20, 160, 50]]
    assert len(samples.read(1).boxes) == len(samples.read(2).boxes) == 0
    assert samples.note == f"{tmp_path} (train): left out 3 boxes outside their image or of no area"


def test_a_set_without_objects_is_told(tmp_path: Path) -> None:
    """It can be trained on, for nothing."""
    folder = changed(write_coco(tmp_path), lambda data: data["annotations"].clear())
    assert open_dense_split(folder, "detect", "train").note == f"{tmp_path} (train): no object is on any image"

    def change(data: dict[str, Any]) -> None:
        data["annotations"] = [{**data["annotations"][0], "bbox": [500, 500, 9, 9]}]

    left = open_dense_split(changed(write_coco(tmp_path), change), "detect", "train").note
    assert left.endswith("left out 1 box outside their image or of no area; no object is left on any image")


def test_objects_without_masks(tmp_path: Path) -> None:
    folder = changed(write_coco(tmp_path), lambda data: data["annotations"][0].pop("segmentation"))
    samples = open_dense_split(folder, "detect", "train", masks=True)
    assert len(samples.read(0).masks) == 1 and "left out 1 box without a mask" in samples.note
    changed(folder, lambda data: [one.pop("segmentation", None) for one in data["annotations"]])
    with pytest.raises(LinvitError, match="has boxes but no masks: give each annotation a segmentation"):
        open_dense(folder, "detect", masks=True)


def test_a_shape_that_cannot_be_drawn(tmp_path: Path) -> None:
    folder = changed(write_coco(tmp_path), lambda data: data["annotations"][0].update(segmentation={"counts": 3}))
    with pytest.raises(LinvitError, match=r"an object of .*astronaut.jpg has a segmentation that cannot be drawn"):
        open_dense_split(folder, "detect", "train", masks=True).read(0)


def test_other_categories_in_validation(tmp_path: Path) -> None:
    folder = changed(write_coco(tmp_path), lambda data: data["categories"][1].update(name="mug"), "val")
    with pytest.raises(LinvitError, match=r"\(val\) has category 'mug', which the training set has not"):
        open_dense(folder, "detect")


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_broken_images(task: str, tmp_path: Path) -> None:
    folder = write_coco(tmp_path)
    file = folder / "images" / "train" / "coffee.jpg"
    file.write_bytes(file.read_bytes()[:1500])
    with pytest.raises(LinvitError, match=r"cannot read image .*coffee.jpg: .*; replace it or take it out") as caught:
        open_dense_split(folder, task, "train").read(2)
    assert "\n" not in str(caught.value)


def test_an_image_of_another_size_than_its_annotation_says(tmp_path: Path) -> None:
    folder = changed(write_coco(tmp_path), lambda data: data["images"][0].update(width=150))
    with pytest.raises(
        LinvitError, match=r"astronaut.jpg has 160×160 pixels, and 150×160 by its annotation: give both"
    ):
        open_dense_split(folder, "detect", "train").read(0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            np.zeros((80, 80), np.uint8),
            r"image .*astronaut.jpg has 160×160 pixels, and 80×80 by .*astronaut.png: give both",
        ),
        (np.zeros((160, 160, 3), np.uint8), r"mask .*astronaut.png has colours \(mode RGB\): give one number a pixel"),
        (np.full((160, 160), 7, np.uint8), r"mask .*astronaut.png has a pixel of 7: give numbers of its 5 categories"),
        (np.full((160, 160), 700, np.uint16), r"mask .*astronaut.png has a pixel of 700"),
    ],
)
def test_masks(mask: np.ndarray, message: str, tmp_path: Path) -> None:
    folder = write_ade(tmp_path)
    Image.fromarray(mask).save(folder / "annotations" / "training" / "astronaut.png")
    with pytest.raises(LinvitError, match=message):
        open_dense_split(folder, "segment", "train").read(0)


def test_masks_in_black_and_white(tmp_path: Path) -> None:
    folder = write_ade(tmp_path)
    (folder / "objectInfo150.txt").unlink()
    (folder / "classes.txt").write_text("nothing\nsomething")
    for mask in folder.glob("annotations/*/*.png"):
        white = np.array(Image.open(mask)) > 0
        Image.fromarray(np.where(white, 255, 0).astype(np.uint8)).save(mask)
    with pytest.raises(LinvitError, match="training has masks of 0 and 255 alone, and 255 is not judged: write 1 for"):
        open_dense(folder, "segment")
    for mask in folder.glob("annotations/*/*.png"):
        Image.open(mask).convert("1").save(mask)  # one bit a pixel: 0 and 1
    assert open_dense(folder, "segment")[0].read(0).labels.unique().tolist() == [0, 1]


def test_missing_files(tmp_path: Path) -> None:
    ade, voc, coco = write_ade(tmp_path / "ade"), write_voc(tmp_path / "voc"), write_coco(tmp_path / "coco")
    (ade / "annotations" / "training" / "coffee.png").unlink()
    with pytest.raises(LinvitError, match=r"training/coffee.jpg has nothing of its name in .*annotations/training"):
        open_dense(ade, "segment")
    (ade / "images" / "training" / "coffee.jpg").unlink()
    (ade / "images" / "training" / "rocket.jpg").unlink()
    with pytest.raises(LinvitError, match=r"training/rocket.png has nothing of its name in .*images/training"):
        open_dense(ade, "segment")
    (voc / "Annotations" / "train_coffee.xml").unlink()
    with pytest.raises(
        LinvitError, match=r"Annotations/train_coffee.xml is not there: put it there, or take the image"
    ):
        open_dense(voc, "detect")
    (voc / "SegmentationClass" / "train_rocket.png").unlink()
    with pytest.raises(LinvitError, match=r"SegmentationClass/train_rocket.png is not there"):
        open_dense(voc, "segment")
    (voc / "JPEGImages" / "train_camera.jpg").unlink()
    with pytest.raises(LinvitError, match=r"train.txt lists train_camera, which is not in .*JPEGImages"):
        open_dense(voc, "detect")
    (coco / "masks" / "train" / "coffee.png").unlink()
    with pytest.raises(LinvitError, match=r"image coffee.jpg has no mask: put it at .*masks/train/coffee.png"):
        open_dense(coco, "segment")
    shutil.rmtree(coco / "masks")
    with pytest.raises(
        LinvitError, match=r"train.json lists objects, which do not cover all pixels: put mask files in"
    ):
        open_dense(coco, "segment")


def test_vocs_lists(tmp_path: Path) -> None:
    folder = write_voc(tmp_path / "VOCdevkit" / "VOC2012")
    xml = folder / "Annotations" / "train_coffee.xml"
    text = xml.read_text()
    for broken, message in (
        (text.replace("xmax", "xmost"), r"train_coffee.xml: object 'cup' has no box: give xmin, ymin, xmax and ymax"),
        (text.replace(">cup<", ">mug<"), r"has objects of category 'mug', which is not listed: add it to the list"),
        (text[:50], r"train_coffee.xml is not XML: "),
    ):
        xml.write_text(broken)
        with pytest.raises(LinvitError, match=message):
            open_dense(folder, "detect")
    (folder / "ImageSets" / "Main" / "val.txt").write_text("\n")
    with pytest.raises(LinvitError, match=r"val.txt lists no image: put some in"):
        open_dense_split(folder, "detect", "val")
    shutil.copytree(folder, folder.parent / "VOC2007")
    with pytest.raises(LinvitError, match=r"VOCdevkit holds several sets: give one of them, such as .*VOC2012"):
        open_dense(folder.parent, "detect")


def test_paths_and_splits(tmp_path: Path) -> None:
    folder = write_ade(tmp_path / "ade")
    for path, task, message in (
        (folder, "detect", "has mask files but no boxes: detection needs COCO's or PASCAL VOC's format"),
        (folder, "boxes", "unknown task 'boxes'"),
        (folder / "images", "segment", "is in no format known here: it has no annotations/train.json"),
        (tmp_path / "add", "segment", r"no data at .*add; did you mean .*ade\?"),
        (folder / "objectInfo150.txt", "segment", "is neither a folder nor a .tar archive, nor COCO's .json"),
    ):
        with pytest.raises(LinvitError, match=message):
            open_dense(path, task)
    with pytest.raises(LinvitError, match="has no split 'best': its splits are training, validation"):
        open_dense_split(folder, "segment", "best")
    shutil.rmtree(folder / "images" / "training")
    with pytest.raises(LinvitError, match="has no split 'train': its splits are validation"):
        open_dense(folder, "segment")
    (folder / "classes.json").write_text("{}")
    (folder / "objectInfo150.txt").unlink()
    with pytest.raises(LinvitError, match=r"classes.json lists no categories: give names, or names by number such as"):
        open_dense_split(folder, "segment", "validation")
    (folder / "classes.json").write_text("[")
    with pytest.raises(LinvitError, match=r"classes.json is not JSON: "):
        open_dense_split(folder, "segment", "validation")
