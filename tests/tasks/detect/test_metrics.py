"""COCO's numbers against pycocotools on the same random predictions, and what neither of the two packages does."""

import builtins
import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as run_lengths
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from linvit.errors import LinvitError
from linvit.tasks.detect.metrics import NUMBERS, DetectionMeter

NAMES = ("cat", "dog", "bird", "nobody")  # the last has no object anywhere
Example = dict[str, Any]


def random_boxes(rng: np.random.Generator, count: int, size: tuple[int, int]) -> np.ndarray:
    """Boxes within an image, small and large."""
    height, width = size
    corner = rng.uniform(0, 1, (count, 2)) * [width - 3, height - 3]
    extent = np.exp(rng.uniform(np.log(2), np.log(150), (count, 2)))
    return np.hstack([corner, np.minimum(corner + extent, [width, height])])


def random_masks(rng: np.random.Generator, boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Ellipses, and noise on them, in the boxes."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    masks = np.zeros((len(boxes), *size), bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        radius = (2 * x - left - right) ** 2 / (right - left) ** 2 + (2 * y - top - bottom) ** 2 / (bottom - top) ** 2
        mask[:] = (radius < 1) & (rng.uniform(size=size) < 0.97)
    return masks


def random_image(rng: np.random.Generator, index: int, masks: bool) -> tuple[Example, Example]:
    """What is in an image and what was found: near misses, doubles, inventions, other classes, nothing at all."""
    size = (int(rng.integers(60, 180)), int(rng.integers(60, 180)))
    count = int(rng.integers(0, 7)) if rng.uniform() < 0.8 else 0
    boxes = random_boxes(rng, count, size)
    labels = rng.integers(0, 3, count)
    near = np.concatenate([np.repeat(np.arange(count), 2), rng.integers(0, max(count, 1), count * 2)])
    drifted = boxes[near] + rng.normal(0, 4, (len(near), 4)) * rng.uniform(0, 1, (len(near), 1))
    drifted = np.sort(drifted.reshape(-1, 2, 2), axis=1).reshape(-1, 4) + np.array([0, 0, 1, 1])
    invented = random_boxes(rng, (40 if masks else 600, 0, 3)[index % 3], size)
    found = np.concatenate([drifted, invented])
    chosen = np.concatenate([labels[near], rng.integers(0, len(NAMES), len(invented))])
    scores = rng.uniform(0, np.repeat([1, 0.7], [len(near), len(invented)])).round(2)  # rounded: there are ties
    if index % 9 == 4:
        found, chosen, scores = found[:0], chosen[:0], scores[:0]
    truth = {"image_id": index * 7 + 3, "size": size, "boxes": boxes, "labels": labels}
    truth |= {"iscrowd": rng.uniform(size=count) < 0.2, "difficult": rng.uniform(size=count) < 0.25}
    truth |= {"areas": (boxes[:, 2:] - boxes[:, :2]).prod(1) * rng.uniform(0.5, 1, count)}
    prediction = {"boxes": found, "scores": scores, "labels": chosen}
    if masks:
        truth["masks"], prediction["masks"] = random_masks(rng, boxes, size), random_masks(rng, found, size)
    return prediction, truth


def examples(seed: int, count: int, masks: bool) -> tuple[list[Example], list[Example]]:
    rng = np.random.default_rng(seed)
    predictions, truths = zip(*(random_image(rng, index, masks) for index in range(count)), strict=True)
    return list(predictions), list(truths)


class WithIgnored(COCOeval):  # type: ignore[misc]
    """pycocotools overwrites what the annotation says is to be ignored; this puts it back."""

    def _prepare(self) -> None:
        super()._prepare()
        for annotations in self._gts.values():
            for annotation in annotations:
                annotation["ignore"] = annotation["iscrowd"] or annotation["difficult"]


def reference(predictions: list[Example], truths: list[Example], kind: str) -> COCOeval:
    def box(corners: np.ndarray) -> list[float]:
        return [*corners[:2].tolist(), *(corners[2:] - corners[:2]).tolist()]

    def packed(mask: np.ndarray) -> Any:
        return run_lengths.encode(np.asfortranarray(mask.astype(np.uint8)))

    annotations, results = [], []
    for prediction, truth in zip(predictions, truths, strict=True):
        for i in range(len(truth["boxes"])):
            row = {"id": len(annotations) + 1, "image_id": truth["image_id"], "category_id": int(truth["labels"][i])}
            row |= {"bbox": box(truth["boxes"][i]), "area": float(truth["areas"][i])}
            row |= {"iscrowd": int(truth["iscrowd"][i]), "difficult": bool(truth["difficult"][i])}
            annotations.append(row | ({"segmentation": packed(truth["masks"][i])} if kind == "segm" else {}))
        for i in range(len(prediction["boxes"])):
            row = {"image_id": truth["image_id"], "category_id": int(prediction["labels"][i])}
            place = {"segmentation": packed(prediction["masks"][i])} if kind == "segm" else {}
            place = place or {"bbox": box(prediction["boxes"][i])}
            results.append(row | place | {"score": float(prediction["scores"][i])})
    coco = COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": t["image_id"], "height": t["size"][0], "width": t["size"][1]} for t in truths],
        "categories": [{"id": index, "name": name} for index, name in enumerate(NAMES)],
        "annotations": annotations,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        judged = WithIgnored(coco, coco.loadRes(results), kind)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return judged


def measured(predictions: list[Example], truths: list[Example], masks: bool = False) -> dict[str, float]:
    meter = DetectionMeter(NAMES, masks)
    meter.add(predictions, truths)
    return meter.compute().metrics()


@pytest.mark.parametrize("seed", range(20))
def test_boxes_are_judged_as_pycocotools_does(seed: int) -> None:
    predictions, truths = examples(seed, 12, masks=False)
    assert max(len(found["boxes"]) for found in predictions) >= 600  # over 100 of a class
    assert any(truth["difficult"].any() for truth in truths) and any(truth["iscrowd"].any() for truth in truths)
    meter = DetectionMeter(NAMES)
    meter.add(predictions, truths)
    found, wanted = meter.compute(), reference(predictions, truths, "bbox")
    assert list(found.boxes) == list(NUMBERS) and found.masks is None
    np.testing.assert_allclose(list(found.boxes.values()), wanted.stats, rtol=0, atol=1e-12)
    assert found.boxes["mAP"] > 0.01
    each = wanted.eval["precision"][:, :, :, 0, -1].mean((0, 1))
    assert found.per_class == pytest.approx({name: each[index] for index, name in enumerate(NAMES[:3])})


@pytest.mark.parametrize("seed", range(4))
def test_masks_are_judged_as_pycocotools_does(seed: int) -> None:
    predictions, truths = examples(100 + seed, 6, masks=True)
    found = measured(predictions, truths, masks=True)
    for prefix, kind in (("", "bbox"), ("mask_", "segm")):
        values = [found[prefix + name] for name in NUMBERS]
        np.testing.assert_allclose(values, reference(predictions, truths, kind).stats, rtol=0, atol=1e-12)
    assert found["mask_mAP"] != found["mAP"]


def one(found: list[Any], truths: list[Any], size: tuple[int, int] = (100, 100), **flags: Any) -> dict[str, float]:
    """Boxes with scores that fall, all of the first class, in one image."""
    prediction = {"boxes": np.array(found).reshape(-1, 4), "scores": np.linspace(0.9, 0.5, len(found))}
    truth = {"image_id": 0, "size": size, "boxes": np.array(truths).reshape(-1, 4), **flags}
    labels = [{"labels": np.zeros(len(boxes), int)} for boxes in (found, truths)]
    return measured([prediction | labels[0]], [truth | labels[1]])


def test_difficult_objects_worked_by_hand() -> None:
    easy, hard, other = [0, 0, 40, 40], [50, 50, 90, 90], [0, 60, 20, 90]
    assert one([easy], [easy, hard])["mAP"] == pytest.approx(51 / 101)  # of two, one: precision 1 up to recall .5
    ignored = {"difficult": [False, True]}
    assert one([easy], [easy, hard], **ignored)["mAP"] == 1, "it is not missed"
    assert one([hard, easy], [easy, hard], **ignored)["mAP"] == 1, "it is not found either"
    assert one([hard, hard, easy], [easy, hard], **ignored)["mAP"] == 0.5, "a second detection of it is false"
    assert one([hard, hard, easy], [easy, hard], iscrowd=[False, True])["mAP"] == 1, "of a crowd it is not"
    assert one([other, easy], [easy, hard], **ignored)["mAP"] == 0.5
    part = [50, 50, 60, 60]
    assert one([part, easy], [easy, hard], **ignored)["mAP"] == 0.5, "a part of it is not the object"
    assert one([part, easy], [easy, hard], iscrowd=[False, True])["mAP"] == 1, "a part of a crowd is in the crowd"


def test_nothing_found_and_nothing_to_find() -> None:
    box = [0, 0, 20, 20]
    nothing = one([], [box])
    assert nothing["mAP"] == nothing["AR100"] == nothing["APs"] == 0 and nothing["APl"] == -1
    assert set(one([box], []).values()) == {-1}
    assert set(one([box], [box], difficult=[True]).values()) == {-1}
    with pytest.raises(LinvitError, match="no image to evaluate on"):
        DetectionMeter(NAMES).compute()


def test_processes_are_merged() -> None:
    predictions, truths = examples(5, 9, masks=True)
    meters = [DetectionMeter(NAMES, masks=True) for _ in range(2)]
    for rank, meter in enumerate(meters):
        meter.add(predictions[rank::2], truths[rank::2])
    meters[1].add(predictions[:1], truths[:1])  # as samplers do, to make the last batches equal
    meters[1].merge(meters[0].state())
    assert meters[1].compute().metrics() == measured(predictions, truths, masks=True)
    with pytest.raises(LinvitError, match="two images with id 3: give each its own"):
        meters[0].add(predictions[:1], truths[:1])


def test_tensors_and_run_lengths_are_taken() -> None:
    predictions, truths = examples(8, 5, masks=True)
    wanted = measured(predictions, truths, masks=True)
    tensors = [{name: torch.as_tensor(value) for name, value in found.items()} for found in predictions]
    packed = [truth | {"masks": [packed_mask(mask) for mask in truth["masks"]]} for truth in truths]
    assert measured(tensors, packed, masks=True) == wanted


def packed_mask(mask: np.ndarray) -> Example:
    """Uncompressed run lengths down the columns, as COCO annotates crowds."""
    flat = np.concatenate([[0], mask.flatten(order="F"), [-1]])
    changes = np.flatnonzero(np.diff(flat))
    return {"size": list(mask.shape), "counts": np.diff(np.concatenate([[0], changes])).tolist()}


@pytest.mark.parametrize(
    ("prediction", "truth", "message"),
    [
        ({"boxes": [[0, 0, float("nan"), 5]]}, {}, "predicted boxes of image 4 are not finite: there is NaN"),
        ({"scores": [float("inf")]}, {}, "predicted scores of image 4 are not finite"),
        ({"labels": [4]}, {}, "predicted labels of image 4 go beyond the 4 categories"),
        ({}, {"labels": [-1]}, "annotated labels of image 4 go beyond"),
        ({}, {"boxes": [[0, 0, float("inf"), 5]]}, "annotated boxes of image 4 are not finite"),
        ({"masks": None}, {}, "image 4 has no predicted masks: measure boxes alone by masks=False"),
        ({"masks": np.ones((1, 9, 5), bool)}, {}, r"image 4 is of \[9, 8\], its mask of \[9, 5\]: resize it"),
    ],
)
def test_mistakes(prediction: Example, truth: Example, message: str) -> None:
    place = {"boxes": [[0, 0, 5, 5]], "labels": [0], "masks": np.ones((1, 9, 8), bool)}
    with pytest.raises(LinvitError, match=message):
        measured([place | {"scores": [0.5]} | prediction], [place | {"image_id": 4, "size": (9, 8)} | truth], True)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    bring = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("faster_coco_eval"):
            raise ModuleNotFoundError(name)
        return bring(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LinvitError, match=r"faster-coco-eval: pip install linvit\[dense\]"):
        DetectionMeter(NAMES)
