"""How well a detector finds objects: COCO's twelve numbers, for boxes and for masks.

Average precision (AP) and average recall (AR) go from 0 to 1. They are means over the classes that have objects and
over the overlaps .50, .55, … .95; AP50 and AP75 keep to one overlap, the letters s, m and l to objects of one size,
and AR1, AR10 and AR100 to so many detections of an image and class. As COCO writes it, −1 says that there was nothing
to judge, such as no small object.

Crowds and difficult objects are neither to be found nor to be left out. Detections of a crowd do not count, however
many there are, and only need to lie in it. A difficult object is a single one: the best detection of it does not count,
the next is false. COCO's evaluation knows no such thing and overwrites the `ignore` of an annotation, but it also
ignores, and as single ones, objects whose area is in none of its ranges. So that is where theirs is put.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from linvit.errors import LinvitError

NUMBERS = ("mAP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
NO_AREA = -1.0  # in none of COCO's ranges

Image = dict[str, Any]  # `id`, `size`, and the columns of `truths` and `found`, all plain lists
Mask = dict[str, Any]  # run lengths, as COCO packs them


@dataclass(frozen=True)
class DetectionMetrics:
    """The numbers by name, and the boxes' AP of each class that has objects."""

    boxes: dict[str, float]
    masks: dict[str, float] | None
    per_class: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """The numbers, for logs."""
        return self.boxes | {f"mask_{name}": value for name, value in (self.masks or {}).items()}


class DetectionMeter:
    """Collects what was found and what is there, image by image, both in the original image's pixels.

    A prediction has `boxes` `(n, 4)` as left, top, right, bottom, `scores`, `labels`, and for masks `masks`
    `(n, height, width)`. A truth has `image_id`, `size` (height and width), `boxes`, `labels`, and if need be
    `iscrowd`, `difficult`, `areas` and `masks`, the last as arrays or as run lengths.
    """

    def __init__(self, categories: Sequence[str], masks: bool = False) -> None:
        evaluation()
        self.categories, self.masks = tuple(categories), masks
        self._images: dict[int, Image] = {}

    def add(self, predictions: Iterable[Mapping[str, Any]], truths: Iterable[Mapping[str, Any]]) -> None:
        for prediction, truth in zip(predictions, truths, strict=True):
            image: Image = {"id": int(truth["image_id"]), "size": [int(side) for side in truth["size"]]}
            if image["id"] in self._images:
                raise LinvitError(f"there are two images with id {image['id']}: give each its own")
            image["truths"] = truths_of(truth, image, self)
            image["found"] = found_in(prediction, image, self)
            self._images[image["id"]] = image

    def state(self) -> list[Image]:
        """What was added, as plain lists, to be merged in another process."""
        return list(self._images.values())

    def merge(self, state: Iterable[Image]) -> None:
        """Add what another process saw. An image that both saw, to fill its last batch, counts once."""
        for image in state:
            self._images.setdefault(image["id"], image)

    def compute(self) -> DetectionMetrics:
        if not self._images:
            raise LinvitError("there is no image to evaluate on")
        boxes, per_class = self._judge("bbox")
        return DetectionMetrics(boxes, self._judge("segm")[0] if self.masks else None, per_class)

    def _judge(self, kind: str) -> tuple[dict[str, float], dict[str, float]]:
        """The numbers, and the AP of each class, by the overlap of boxes or masks."""
        coco, judge, _ = evaluation()
        images = sorted(self._images.values(), key=lambda image: image["id"])  # in whichever order they were added
        sizes = [{"id": image["id"], "height": image["size"][0], "width": image["size"][1]} for image in images]
        truths = [row | {"image_id": image["id"]} for image in images for row in rows(image["truths"])]
        other = "segmentation" if kind == "bbox" else "bbox"  # with a box, a detection would be of the box's area
        found = [row | {"image_id": image["id"]} for image in images for row in rows(image["found"], without=other)]
        known = coco(
            {
                "images": sizes,
                "categories": [{"id": index, "name": name} for index, name in enumerate(self.categories)],
                "annotations": [row | {"id": index} for index, row in enumerate(truths, start=1)],
            }
        )
        judged = judge(known, known.loadRes(found), kind)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
        precision = np.moveaxis(judged.eval["precision"][:, :, :, 0, -1], 2, 0)  # by class; all areas, 100 detections
        of_classes = {name: float(p.mean()) for name, p in zip(self.categories, precision, strict=True) if p.min() > -1}
        return dict(zip(NUMBERS, map(float, judged.stats), strict=True)), of_classes


def truths_of(truth: Mapping[str, Any], image: Image, meter: DetectionMeter) -> dict[str, list[Any]]:
    """The columns of an image's objects, as COCO names them."""
    columns = located(truth, "annotated", image, meter)
    sides = np.array(columns["bbox"]).reshape(-1, 4)[:, 2:]
    unless = {"areas": sides.prod(1), "iscrowd": np.zeros(len(sides)), "difficult": np.zeros(len(sides))}
    areas, crowd, difficult = (other if truth.get(name) is None else truth[name] for name, other in unless.items())
    areas = np.where(array(difficult), NO_AREA, finite(areas, "annotated areas", image))
    return columns | {"area": areas.tolist(), "iscrowd": array(crowd).astype(int).tolist()}


def found_in(prediction: Mapping[str, Any], image: Image, meter: DetectionMeter) -> dict[str, list[Any]]:
    """The columns of an image's detections, as COCO names them."""
    scores = finite(prediction["scores"], "predicted scores", image)
    return located(prediction, "predicted", image, meter) | {"score": scores.tolist()}


def located(objects: Mapping[str, Any], how: str, image: Image, meter: DetectionMeter) -> dict[str, list[Any]]:
    """Where objects are and what they are."""
    boxes = finite(objects["boxes"], f"{how} boxes", image).reshape(-1, 4)
    labels = array(objects["labels"]).astype(int)
    if labels.size and not 0 <= labels.min() <= labels.max() < len(meter.categories):
        raise LinvitError(f"the {how} labels of image {image['id']} go beyond the {len(meter.categories)} categories")
    columns = {"bbox": np.hstack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]]).tolist(), "category_id": labels.tolist()}
    if meter.masks:
        if objects.get("masks") is None:
            raise LinvitError(f"image {image['id']} has no {how} masks: measure boxes alone by masks=False")
        columns["segmentation"] = run_lengths(objects["masks"], image)
    return columns


def run_lengths(masks: Any, image: Image) -> list[Mask]:
    """Masks as run lengths, a hundredth of the memory."""
    pack = evaluation()[2]
    if isinstance(masks, (list, tuple)) and masks and isinstance(masks[0], Mapping):
        packed = [pack.frPyObjects([m], *m["size"])[0] if isinstance(m["counts"], list) else m for m in masks]
    else:
        dense = array(masks).astype(np.uint8)
        packed = pack.encode(np.asfortranarray(dense.transpose(1, 2, 0))) if dense.size else []
    for mask in packed:
        if list(mask["size"]) != image["size"]:
            height, width = mask["size"]
            raise LinvitError(f"image {image['id']} is of {image['size']}, its mask of [{height}, {width}]: resize it")
    texts = [mask["counts"] for mask in packed]
    return [{"size": image["size"], "counts": t.decode() if isinstance(t, bytes) else t} for t in texts]


def rows(columns: Mapping[str, list[Any]], without: str = "") -> list[dict[str, Any]]:
    """Columns as one dict for each object."""
    names = [name for name in columns if name != without]
    return [dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)]


def finite(values: Any, what: str, image: Image) -> np.ndarray:
    """Numbers in double precision, if they are numbers."""
    found = array(values).astype(np.float64)
    if not np.isfinite(found).all():
        raise LinvitError(f"the {what} of image {image['id']} are not finite: there is NaN or infinity in them")
    return found


def array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = (values.double() if values.is_floating_point() else values).detach().cpu()
    return np.asarray(values)


def evaluation() -> tuple[Any, Any, Any]:
    """COCO's data, its evaluation and its masks, from a package that is not always there."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
        from faster_coco_eval.core import mask
    except ImportError:
        raise LinvitError("metrics of detection come from faster-coco-eval: pip install linvit[dense]") from None
    return COCO, COCOeval_faster, mask
